"""/openapi.json says what the server does: answers fit it, and so do the requests that pass."""

import json

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from core.config import ClusterConfig, GatewayConfig
from core.messages import StopReason
from gateway.http_gate import HEALTH_PATHS
from gateway.openai_fields import Passes
from gateway.openapi import document
from gateway.ranges import RANGES, Range, with_range
from gateway.validation import Limits

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def described():
    limits = Limits(
        served_name="demo-model",
        window=8192,
        vocab_size=49152,
        max_stop_strings=16,
        max_stop_chars=256,
    )
    return document(GatewayConfig(), limits)


@pytest.fixture(scope="module")
def fits(described):
    """Whether a value fits the schema of this name."""

    def check(name, value):
        schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
        return jsonschema.Draft202012Validator(schema).is_valid(value)

    return check


async def test_it_is_served(http, described):
    assert (await http.get("/openapi.json")).json() == described


def test_every_route_is_described_and_no_other(http, described):
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in http.app.routes
        for method in route.methods - {"HEAD"}
        if route.path != "/openapi.json"
    }
    told = {(path, method) for path, item in described["paths"].items() for method in item}
    assert told == routes


def test_the_whole_is_a_document_of_openapi_3_1(described):
    OpenAPIV31SpecValidator(described).validate()


def test_a_key_is_asked_for_everywhere_but_for_health(described):
    assert {"bearer": []} in described["security"]
    assert described["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, item in described["paths"].items():
        for operation in item.values():
            is_open = operation.get("security") == [{}]
            assert is_open == (path in HEALTH_PATHS), path


def test_every_schema_is_valid_and_every_reference_leads_somewhere(described):
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(described)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in described["components"]["schemas"]


@pytest.mark.parametrize("route, name", [("chat", "ChatCompletion"), ("complete", "Completion")])
async def test_answers_fit(http, backend, fits, route, name):
    send = getattr(http, route)
    assert fits(name, (await send()).json())
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    assert fits(name, (await send(include_timing=True)).json())
    assert fits(name, (await send(prompt_logprobs=1)).json())
    for fields in ({"stream": True}, usage, {**usage, "include_timing": True}):
        chunks = (await send(**fields)).chunks
        assert len(chunks) > 2
        assert all(fits(f"{name}Chunk", chunk) for chunk in chunks)
    backend.say("so far", reason=StopReason.LENGTH)
    assert fits(name, (await send()).json())
    backend.script = [*backend.script[:1], KeyError("x")]
    error = json.loads((await send(stream=True)).data[-1])
    assert fits("Error", error) and "request_id" in error["error"]


async def test_other_answers_fit(http, fits):
    for path, name in (
        ("/v1/models", "ModelList"),
        ("/v1/models/demo-model", "Model"),
        ("/version", "Version"),
        ("/healthz", "Health"),
        ("/readyz", "Readiness"),
        ("/nowhere", "Error"),
    ):
        assert fits(name, (await http.get(path)).json())
    asked = {"prompt": "x", "return_token_strs": True}
    assert fits("Tokenized", (await http.post("/tokenize", asked)).json())
    assert fits("Detokenized", (await http.post("/detokenize", {"tokens": [5]})).json())


VALUES = [None, True, False, 0, 1, -1, 2, 3.5, -2.5, 10.5, 2**63, "", "x", [], ["x"], [5], {}]


@pytest.mark.parametrize("name, route", [("ChatBody", "chat"), ("CompletionBody", "complete")])
async def test_what_the_schema_refuses_the_server_refuses_and_the_reverse(
    http, described, fits, name, route
):
    filled = {"messages": HI} if route == "chat" else {"prompt": "x"}
    for field in described["components"]["schemas"][name]["properties"]:
        for value in VALUES:
            body = {"model": "demo-model", **filled, field: value}
            if field == "stream_options":
                body["stream"] = True
            path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
            reply = await http.post(path, body)
            assert reply.status in (200, 400, 404), reply.body
            accepted = reply.status == 200
            told = fits(name, body)
            assert accepted <= told, (field, value, reply.body)
            if told and not accepted:
                assert (field, repr(value)) in NEEDS_MORE, (field, value, reply.body)


# What a schema cannot tell.
NEEDS_MORE = {
    ("max_tokens", str(2**63)),
    ("max_completion_tokens", str(2**63)),
    ("stop_token_ids", "['x']"),
    ("min_tokens", str(2**63)),
    ("top_logprobs", "1"),  # without logprobs
    ("top_logprobs", "2"),
    ("best_of", "2"),  # n is 1
    ("prompt", "[]"),
    ("prompt", "''"),
    ("structured_outputs", "{}"),
    ("guided_choice", "[]"),
    *((f"guided_{kind}", repr(text)) for kind in ("json", "grammar") for text in ("", "x")),
}


class TestStrict:
    @pytest.fixture
    def config(self):
        return ClusterConfig(gateway=GatewayConfig(strict_fields=True, max_stop_strings=3))

    async def test_it_tells_this_servers_limits(self, http):
        schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
        assert schemas["ChatBody"]["additionalProperties"] is False
        (limit,) = (
            branch["maxItems"]
            for branch in schemas["ChatBody"]["properties"]["stop"]["anyOf"]
            if branch["type"] == "array"
        )
        assert limit == 3


def test_a_range_tells_what_it_checks():
    open_below = Range(low=0, high=1, above=True)
    assert open_below.keywords == {"exclusiveMinimum": 0, "maximum": 1}
    assert open_below.words == "above 0 and at most 1"
    assert Range().words == "any number"
    assert with_range({"type": "string"}, open_below) == {"type": "string"}
    assert RANGES["presence_penalty"].keywords == {"minimum": -2, "maximum": 2}


def test_values_that_pass_are_told_with_their_types():
    assert Passes(values=(1,)).schema == {"enum": [1, None]}
    assert Passes(kinds=(str, dict)).schema == {"type": ["string", "object", "null"]}
