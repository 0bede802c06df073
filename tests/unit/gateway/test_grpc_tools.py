"""Tools and what an answer must be, over gRPC: as over HTTP, in this protocol's own shapes."""

import json

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.messages import GrammarKind, StopReason
from protos.tandem.v1 import inference_pb2 as pb
from tests.unit.gateway.test_grpc_service import Context, call, chat, generate, refused
from tests.unit.gateway.test_tools import CALL, PARAMETERS, SAID

__all__ = ["call"]  # a fixture

SCHEMA = json.dumps(PARAMETERS)
AUTO, NONE, REQUIRED = (
    pb.ToolChoice(mode=mode)
    for mode in (pb.TOOL_CHOICE_MODE_AUTO, pb.TOOL_CHOICE_MODE_NONE, pb.TOOL_CHOICE_MODE_REQUIRED)
)


@pytest.fixture
def config() -> ClusterConfig:
    return ClusterConfig(gateway=GatewayConfig(tool_parser="hermes"))


def tool(name="get_weather", **more):
    return pb.Tool(**{"name": name, "parameters": SCHEMA} | more)


def asking(*tools, sampling=None, messages=(), **fields):
    request = chat(**sampling or {})
    request.messages.extend(messages)
    request.MergeFrom(pb.ChatRequest(tools=tools, **fields))
    return request


TOOLS = (tool(description="Tells the weather."), tool("get_time"))


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_calls_come_in_pieces_and_the_last_delta_says_that_they_are_whole(
    call, backend, size
):
    backend.say(f"Let me see.{SAID}\n{SAID}", size=size)
    *deltas, _ = [each.delta for each in await call("Chat", asking(*TOOLS), Context())]
    assert "".join(delta.text for delta in deltas) == "Let me see."
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    ids = set()
    for index in (0, 1):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert first.name == "get_weather"
        assert {(piece.id, piece.name) for piece in others} <= {("", "")}
        assert first.arguments + "".join(p.arguments for p in others) == '{"city": "Paris"}'
        ids.add(first.id)
    assert len(ids) == 2 and "" not in ids
    assert [delta.calls_complete for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    told = [token_id for delta in deltas for token_id in delta.token_ids]
    assert told == [token_id for batch in backend.script for token_id in batch.token_ids]


@pytest.mark.parametrize("request_", [asking(*TOOLS), asking(), asking(*TOOLS, tool_choice=NONE)])
async def test_what_is_no_call_is_text(call, backend, request_):
    text = SAID.replace("get_weather", "unknown")
    backend.say(text)
    *deltas, _ = [each.delta for each in await call("Chat", request_, Context())]
    assert "".join(delta.text for delta in deltas) == text
    assert not any(delta.tool_calls or delta.calls_complete for delta in deltas)


async def test_a_call_that_was_cut_is_not_complete(call, backend):
    backend.say(SAID[:-25], reason=StopReason.LENGTH)
    *deltas, _ = [each.delta for each in await call("Chat", asking(*TOOLS), Context())]
    assert any(delta.tool_calls for delta in deltas)
    assert not any(delta.calls_complete for delta in deltas)


async def test_each_choice_has_calls_of_its_own(call, backend):
    backend.say(SAID)
    *deltas, _ = await call("Chat", asking(*TOOLS, sampling={"n": 2}), Context())
    begun = [(d.delta.choice, p.id) for d in deltas for p in d.delta.tool_calls if p.id]
    assert [choice for choice, _ in sorted(begun)] == [0, 1]
    assert len({call_id for _, call_id in begun}) == 2


async def test_the_model_is_told_of_tools_calls_and_results(call, backend, tokenizer):
    made = pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Paris"}')
    turns = [
        pb.ChatMessage(role="assistant", tool_calls=[made]),
        pb.ChatMessage(role="tool", tool_call_id="c1", name="get_weather", content="Sunny"),
    ]
    await call("Chat", asking(*TOOLS, messages=turns), Context())
    told = tokenizer.decode(backend.jobs[-1].prompt_token_ids)
    assert "Tells the weather." in told
    assert f"<tool_call>\n{CALL}\n</tool_call>" in told
    assert "<tool_response>\nSunny\n</tool_response>" in told
    conversation = pb.Conversation(messages=[*chat().messages, *turns], tools=TOOLS)
    request = pb.TokenizeRequest(model="demo-model", conversation=conversation)
    ids = (await call("Tokenize", request, Context())).token_ids
    assert tuple(ids) == backend.jobs[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (REQUIRED, {"get_weather", "get_time"}),
        (pb.ToolChoice(name="get_time"), {"get_time"}),
    ],
)
async def test_a_forced_call_is_held_to_the_tools_that_may_be_called(call, backend, choice, names):
    backend.say(SAID)
    await call("Chat", asking(*TOOLS, tool_choice=choice), Context())
    text = backend.jobs[-1].sampling.grammar.text
    assert {name for name in ("get_weather", "get_time") if name in text} == names


async def test_auto_is_free_unless_a_tool_is_strict(call, backend):
    await call("Chat", asking(*TOOLS, tool_choice=AUTO), Context())
    assert backend.jobs[-1].sampling.grammar is None
    await call("Chat", asking(tool(strict=True)), Context())
    assert backend.jobs[-1].sampling.grammar is not None


FORMATS = [
    ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA),
    ({"json_object": pb.AnyJsonObject()}, GrammarKind.JSON_SCHEMA),
    ({"regex": "[a-z]+"}, GrammarKind.REGEX),
    ({"choice": pb.Alternatives(texts=["yes", "no\u00fc"])}, GrammarKind.LARK),
    ({"grammar": 'root ::= "a" [0-9]+'}, GrammarKind.LARK),
    ({"grammar": "start: /a[0-9]+/"}, GrammarKind.LARK),
]


@pytest.mark.parametrize(("format_", "kind"), FORMATS)
async def test_a_format_reaches_the_workers_from_both_calls(call, backend, format_, kind):
    asked = pb.AnswerFormat(**format_)
    await call("Chat", asking(answer_format=asked), Context())
    await call("Generate", generate(text="x", answer_format=asked), Context())
    first, second = (job.sampling.grammar for job in backend.jobs)
    assert first == second and first.kind is kind


DEEP = '{"a":' * 70 + "1" + "}" * 70


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [pb.Tool()]}, "tools[0].name"),
        ({"tools": [tool("bad name")]}, "tools[0].name"),
        ({"tools": [tool("\u202eevil\U0001f600")]}, "tools[0].name"),
        ({"tools": [tool("a" * 65)]}, "tools[0].name"),
        ({"tools": [tool(), tool()]}, "tools[1].name"),
        ({"tools": [tool(parameters="")]}, "tools[0].parameters"),
        ({"tools": [tool(parameters="[]")]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"type": "string"}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"const": NaN}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"const": 1e999}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"const": "\\udfff"}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"a": 1, "a": 2}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters=DEEP)]}, "tools[0].parameters"),
        ({"tools": [tool(f"f{i}") for i in range(10_000)]}, "tools"),
        (
            {"tools": [tool(parameters='{"not": {}}')], "tool_choice": REQUIRED},
            "tools[0].parameters",
        ),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice()}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice(name="")}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice(name="other")}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice(mode=9)}, "tool_choice.mode"),
        ({"tool_choice": REQUIRED}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": REQUIRED,
                "answer_format": pb.AnswerFormat(regex="a"),
            },
            "tool_choice",
        ),
        ({"tools": TOOLS, "answer_format": pb.AnswerFormat(regex="a")}, "answer_format.regex"),
        ({"answer_format": pb.AnswerFormat()}, "answer_format"),
        ({"answer_format": pb.AnswerFormat(json_schema="{")}, "answer_format.json_schema"),
        (
            {"answer_format": pb.AnswerFormat(json_schema='{"uniqueItems": true}')},
            "answer_format.json_schema",
        ),
        ({"answer_format": pb.AnswerFormat(json_schema=DEEP)}, "answer_format.json_schema"),
        ({"answer_format": pb.AnswerFormat(regex="(")}, "answer_format.regex"),
        ({"answer_format": pb.AnswerFormat(regex="a" * 70_000)}, "answer_format.regex"),
        ({"answer_format": pb.AnswerFormat(choice=pb.Alternatives())}, "answer_format.choice"),
        ({"answer_format": pb.AnswerFormat(grammar="")}, "answer_format.grammar"),
        ({"answer_format": pb.AnswerFormat(grammar="start: (")}, "answer_format.grammar"),
        (
            {
                "answer_format": pb.AnswerFormat(regex="a"),
                "sampling": {"ignore_eos": True},
            },
            "ignore_eos",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(call, backend, fields, field):
    tools = fields.pop("tools", ()) if "tools" in (fields := dict(fields)) else ()
    context = await refused(call, "Chat", asking(*tools, **fields))
    assert context.code.name == "INVALID_ARGUMENT"
    assert context.violation.field == field
    assert backend.jobs == []


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "x", "tool_calls": [pb.ToolCall(name="f")]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [pb.ToolCall()]}, "tool_calls[0].name"),
        (
            {"role": "assistant", "tool_calls": [pb.ToolCall(name="f", arguments="[1]")]},
            "tool_calls[0].arguments",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [pb.ToolCall(name="f", arguments='{"a":"\\ud83c"}')],
            },
            "tool_calls[0].arguments",
        ),
        ({"role": "assistant"}, "content"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "user", "content": "x", "name": "c"}, "name"),
        ({"role": "", "content": "x"}, "role"),
    ],
)
async def test_messages_with_calls_are_checked(call, backend, message, field):
    request = asking(messages=[pb.ChatMessage(**message)])
    assert (await refused(call, "Chat", request)).violation.field == f"messages[1].{field}"
    assert backend.jobs == []


async def test_no_number_of_choices_costs_memory_before_it_is_refused(call):
    request = asking(*TOOLS, sampling={"n": 2**31 - 1})
    assert (await refused(call, "Chat", request)).violation.field == "n"


async def test_text_that_is_not_utf8_is_found_beside_every_other_field(call):
    request = asking(*TOOLS, sampling={"logit_bias": {1: 1.0}}).SerializeToString()
    broken = request.replace(b"Tells the weather.", b"Tells the\xff\xfeeather.")
    context = await refused(call, "Chat", broken)
    assert context.violation.field == "tools[0].description"
