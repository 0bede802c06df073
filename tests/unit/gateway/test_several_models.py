"""Two models behind one gateway: each is found by its names, and held to its own limits."""

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.errors import InvalidRequest, ModelNotFound
from core.health import told_by_model
from gateway.api import InferenceApi
from gateway.caller import Caller
from gateway.http_app import create_app
from gateway.loaded_model import LoadedModel
from gateway.readiness import Readiness
from tests.unit.gateway.conftest import Http

ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def models(card, tokenizer):
    short = ClusterConfig(gateway=GatewayConfig(max_prompt_tokens=8, default_max_tokens=5))
    made = [
        LoadedModel(card, "long", ClusterConfig(), aliases=("default",), tokenizer=tokenizer),
        LoadedModel(card, "short", short, tokenizer=tokenizer),
    ]
    yield made
    for model in made:
        model.close()


@pytest.fixture
def api(models, backend):
    return InferenceApi(models, GatewayConfig(), backend)


@pytest.fixture
def http(api):
    return Http(create_app(api, readiness=lambda: (True, "")))


async def test_every_name_is_listed_and_an_alias_says_what_it_stands_for(http):
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["alias_of"]) for each in listed] == [
        ("long", None),
        ("default", "long"),
        ("short", None),
    ]
    assert (await http.get("/v1/models/default")).json() == listed[1]


async def test_a_name_that_nobody_has_is_answered_with_those_that_there_are(http):
    reply = await http.get("/v1/models/other")
    assert reply.status == 404
    assert reply.error["message"].endswith("served: long (also default), short")
    assert (await http.post("/v1/chat/completions", {"model": "other", **ASKED})).status == 404


@pytest.mark.parametrize("name", ["long", "default", "short"])
async def test_an_answer_and_its_job_tell_the_models_own_name(http, backend, name):
    own = "short" if name == "short" else "long"
    reply = await http.post("/v1/completions", {"model": name, "prompt": "Hi"})
    assert reply.json()["model"] == own
    assert backend.jobs[-1].model == own


async def test_each_model_has_limits_of_its_own(http, backend):
    text = "one two three four five six seven eight nine ten"
    refused = await http.post("/v1/completions", {"model": "short", "prompt": text})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert refused.error["message"].endswith("a prompt may have 8")
    taken = await http.post("/v1/completions", {"model": "long", "prompt": text})
    assert taken.status == 200
    await http.post("/v1/completions", {"model": "short", "prompt": "Hi"})
    assert backend.jobs[-1].sampling.max_new_tokens == 5
    await http.post("/v1/completions", {"model": "short", "prompt": "Hi", "max_tokens": 9})
    assert backend.jobs[-1].sampling.max_new_tokens == 9


async def test_a_model_must_be_named_where_there_are_several(http):
    refused = await http.post("/tokenize", {"prompt": "Hi"})
    assert (refused.status, refused.error["param"]) == (400, "model")
    assert (await http.post("/tokenize", {"prompt": "Hi", "model": "default"})).status == 200


async def test_the_description_names_every_model(http):
    schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["model"]["enum"] == ["long", "default", "short"]
    assert None not in schemas["TokenizeBody"]["properties"]["model"]["enum"]


def test_a_key_may_use_a_model_by_any_of_its_names_and_learns_of_no_other(api):
    for listed in ("long", "default"):
        caller = Caller(models=frozenset({listed}))
        assert api.models.named("default", caller).info.id == "long"
        assert api.models.named("long", caller).info.id == "long"
        for name in ("short", "nobody"):
            with pytest.raises(ModelNotFound, match=r"it may use: long \(also default\)$"):
                api.models.named(name, caller)
    with pytest.raises(ModelNotFound, match="it may use: none"):
        api.models.named("long", Caller(models=frozenset({"gone"})))
    with pytest.raises(InvalidRequest, match="must name a model"):
        api.models.named("", Caller())


def test_a_gateway_that_serves_some_models_is_ready_and_says_which_it_lacks():
    readiness = Readiness()
    reasons = {"a": None, "b": "no decode worker is ready"}
    readiness.say(None, in_part=told_by_model(reasons))
    assert readiness() == (True, "b: no decode worker is ready")
    assert readiness.not_ready() is None
    readiness.say(told_by_model({"a": "away", "b": "away"}))
    assert readiness() == (False, "away")
