"""What an answer must be: every way to say so, checked before the queue, one at a time."""

import json

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.errors import InvalidGrammar
from core.messages import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA, separators=(",", ":")))
ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')
CHOICE = Grammar(kind=GrammarKind.LARK, text='start: "yes" | "no\\u00fc"\n')
GBNF = 'root ::= "a" [0-9]+'


def schema_format(schema: object = SCHEMA, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": schema_format()}, JSON_SCHEMA),
        ({"response_format": schema_format(strict=True)}, JSON_SCHEMA),
        ({"response_format": schema_format(strict=False, description="d")}, JSON_SCHEMA),
        ({"guided_json": SCHEMA}, JSON_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, JSON_SCHEMA),
        ({"guided_regex": "[a-z]+"}, Grammar(kind=GrammarKind.REGEX, text="[a-z]+")),
        ({"guided_choice": ["yes", "noü", "yes"]}, CHOICE),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"choice": ["yes", "noü"], "regex": None}}, CHOICE),
    ],
)
async def test_every_way_to_say_it_reaches_the_workers(http, backend, route, fields, grammar):
    assert (await getattr(http, route)(**fields)).status == 200
    assert backend.jobs[-1].sampling.grammar == grammar


@pytest.mark.parametrize("text", ["start: /a[0-9]+/", GBNF])
async def test_a_grammar_may_be_lark_or_gbnf(http, backend, text):
    for fields in ({"guided_grammar": text}, {"structured_outputs": {"grammar": text}}):
        assert (await http.chat(**fields)).status == 200
        assert backend.jobs[-1].sampling.grammar.kind is GrammarKind.LARK


DEEP: dict = {"type": "string"}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "not a value"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            "needs type",
        ),
        ({"guided_json": {"type": "strange"}}, "guided_json", "Invalid type"),
        ({"guided_json": '{"const": NaN}'}, "guided_json", "finite"),
        ({"guided_json": '{"maximum": 1e999}'}, "guided_json", "finite"),
        ({"guided_json": '{"const": "\\udfff"}'}, "guided_json", "surrogate"),
        ({"guided_json": '{"a":' * 70 + "1" + "}" * 70}, "guided_json", "nested deeper"),
        (
            {"structured_outputs": {"\u202e<b>\n": "x", "regex": "a"}},
            "structured_outputs.??b??",
            "not supported",
        ),
        ({"guided_json": {"not": {}}}, "guided_json", 'Unimplemented keys: ["not"]'),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"type": "string", "format": "nope"}}, "guided_json", "format"),
        (
            {"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}},
            "guided_json",
            "minimum",
        ),
        ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, "guided_json", "Resource"),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "Resource"),
        ({"guided_json": "[1]"}, "guided_json", "must be a JSON object"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": 5}, "guided_json", "string or an object"),
        ({"guided_json": DEEP}, None, "nested deeper"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": [1]}, "guided_choice[0]", "string"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "no grammar"}, "guided_grammar", "Expected"),
        ({"structured_outputs": {}}, "structured_outputs", "one constraint"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", ""),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "cannot be combined with response_format",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ],
)
async def test_what_cannot_be_held_is_refused_before_it_queues(http, backend, fields, param, says):
    reply = await http.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert says in reply.error["message"]
    assert backend.jobs == []


async def test_what_only_a_worker_finds_out_names_the_field_too(http, backend):
    """Before the first token or behind it, whole or streamed."""
    backend.refusal = InvalidGrammar("the grammar is too complex")
    for fields, param in (
        ({"guided_regex": "a"}, "guided_regex"),
        ({"response_format": schema_format()}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "stream": True}, "guided_regex"),
    ):
        error = (await http.chat(**fields)).error
        assert (error["code"], error["param"]) == ("invalid_grammar", param)
    backend.refusal = None
    backend.script = [*backend.script[:1], InvalidGrammar("the grammar is too complex")]
    assert (await http.chat(guided_regex="a")).error["param"] == "guided_regex"
    streamed = json.loads((await http.chat(guided_regex="a", stream=True)).data[-1])
    assert streamed["error"]["param"] == "guided_regex"


class TestSmall:
    @pytest.fixture
    def config(self):
        return ClusterConfig(gateway=GatewayConfig(max_grammar_bytes=64, strict_fields=True))

    async def test_a_large_grammar_is_refused_with_the_limit(self, http):
        error = (await http.chat(guided_regex="a" * 65)).error
        assert (error["param"], "at most 64" in error["message"]) == ("guided_regex", True)

    async def test_unknown_fields_inside_are_named(self, http):
        for fields, param in (
            ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
            (
                {"response_format": schema_format() | {"json_schema": {"name": "n", "y": 1}}},
                "response_format.json_schema.y",
            ),
        ):
            assert (await http.chat(**fields)).error["param"] == param


async def test_large_repetitions_are_checked_in_bounded_time(http):
    """The worst of them cost a worker's side thread half a second, and the gateway nothing."""
    for regex in ("(a{1000}){1000}", "((a{100}){100}){100}", "(a|aa)+", "(.*a){20}"):
        assert (await http.chat(guided_regex=regex)).status in (200, 400)
