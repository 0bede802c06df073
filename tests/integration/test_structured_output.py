"""The real model, held to a schema: whatever it writes at temperature 1 parses and validates."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from core.config import EngineConfig
from core.grammar import check_grammar, schema_text
from core.messages import Grammar, GrammarKind, SamplingParams, StopReason, TransferId
from core.model_card import ModelCard
from engine.engine import SequenceEvent
from engine.host import EngineHost, build_host
from engine.prepare import prepare
from engine.sequence import Sequence, SequenceKey
from gateway.tokenizer import PromptTokenizer

pytestmark = pytest.mark.slow

StartCluster = Callable[..., Any]
MAX_TOKENS = 110
SEEDS = (1, 2)
DEADLINE_S = 240.0


def record(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all of them, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 24}
ZIP = {"type": "integer", "minimum": 0, "maximum": 99999}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "nested": record(user=record(name=SHORT, home=record(city=SHORT, zip=ZIP))),
    "deep": record(a=record(b=record(c=record(d=record(e={"type": "boolean"}))))),
    "enum": record(color={"enum": ["red", "green", "blue"]}, size={"enum": [1, 2.5, None, "L"]}),
    "const": record(kind={"const": "invoice"}, version={"const": 3}),
    "unicode": record(größe={"enum": ["klein", "groß", "日本語", "😀"]}, имя=SHORT),
    "unicode_const": {"const": {"naïve": ["é", "\u2028", '"\\', "\n"]}},
    "escapes": record(text={"type": "string", "pattern": '^[a-z"\\\\\\n]{1,12}$'}),
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [SHORT, {"type": "number"}, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "array_of_objects": {
        "type": "array",
        "items": record(id={"type": "integer", "minimum": 1, "maximum": 9}, tag=SHORT),
        "maxItems": 3,
    },
    "integer_bounds": record(n={"type": "integer", "minimum": -17, "exclusiveMaximum": 1000}),
    "number_bounds": record(x={"type": "number", "minimum": -1.5, "maximum": 2.25}),
    "multiple": record(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "nullable": record(note={"type": ["string", "null"], "maxLength": 20}),
    "any_of": record(v={"anyOf": [{"type": "integer"}, SHORT, {"type": "null"}]}),
    "one_of": {
        "oneOf": [
            record(kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
            record(kind={"const": "dog"}, tricks={"type": "array", "items": SHORT, "maxItems": 2}),
        ]
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": SHORT}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    },
    "pattern": record(phone={"type": "string", "pattern": "^\\d{3}-\\d{4}$"}),
    "pattern_inside": record(word={"type": "string", "pattern": "q[aeiou]", "maxLength": 30}),
    "format_date": record(day={"type": "string", "format": "date"}),
    "format_uuid": record(id={"type": "string", "format": "uuid"}),
    "length": record(code={"type": "string", "minLength": 3, "maxLength": 6}),
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": SHORT, "c": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,4}$": {"type": "integer"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "definitions": {
        **record(from_={"$ref": "#/$defs/point"}, to={"$ref": "#/$defs/point"}),
        "$defs": {"point": record(x={"type": "integer"}, y={"type": "integer"})},
    },
    "recursive_list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": record(
                v={"type": "integer", "minimum": 0, "maximum": 9},
                next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            )
        },
    },
    "recursive_tree": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": record(
                name={"type": "string", "maxLength": 8},
                children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            )
        },
    },
    "any_object": {"type": "object"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
}


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(card: ModelCard) -> PromptTokenizer:
    return PromptTokenizer(card)


@pytest_asyncio.fixture
async def host(card: ModelCard) -> AsyncIterator[EngineHost]:
    host = await build_host(
        card, EngineConfig(max_seqs=64), kv_bytes=2**30, threads=2, secret=b"0123456789abcdef"
    )
    yield host
    await host.close()


def ask(
    host: EngineHost, prompt: tuple[int, ...], name: str, seed: int, grammar: Grammar, **more: Any
) -> Sequence:
    leased = host.lease(prompt, len(prompt) + 1, "")
    return Sequence(
        key=SequenceKey(TransferId(request_id=name, attempt=0), seed),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=leased.lease.num_shared * host.block_size,
        lease=leased.lease,
        sampling=SamplingParams(
            **{"temperature": 1.0, "seed": seed, "max_new_tokens": MAX_TOKENS, "grammar": grammar}
            | more
        ),
        block_hashes=leased.hashes,
        num_published_blocks=leased.lease.num_shared,
    )


async def answers(host: EngineHost, asked: list[Sequence]) -> dict[SequenceKey, StopReason]:
    """Runs the sequences to their ends; their tokens are in them."""
    ended: dict[SequenceKey, StopReason] = {}
    failures: list[Exception] = []
    done = asyncio.Event()

    def on_step(events: tuple[SequenceEvent, ...]) -> None:
        for event in events:
            if event.stop_reason is not None:
                ended[event.key] = event.stop_reason
        if len(ended) == len(asked):
            done.set()

    def on_error(keys: tuple[SequenceKey, ...], error: Exception) -> None:
        failures.append(error)
        done.set()

    engine = host.engine(on_step=on_step, on_error=on_error)
    loop = asyncio.create_task(engine.run())
    for sequence in asked:
        engine.add(sequence)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await done.wait()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        for sequence in asked:
            sequence.lease.release()
    assert not failures
    return ended


@pytest.mark.timeout(300)
async def test_every_answer_under_a_schema_parses_and_validates(
    host: EngineHost, card: ModelCard, tokenizer: PromptTokenizer
) -> None:
    prompt = tokenizer.encode_rendered(
        "<|im_start|>user\nGive me an example as JSON.<|im_end|>\n<|im_start|>assistant\n"
    )
    asked = []
    for name, schema in SCHEMAS.items():
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema_text(schema))
        check_grammar(grammar)
        asked += [ask(host, prompt, name, seed, grammar) for seed in SEEDS]
    ended = await answers(host, asked)

    whole = dict.fromkeys(SCHEMAS, 0)
    for sequence in asked:
        name = sequence.key.transfer.request_id
        answer = sequence.token_ids[len(prompt) :]
        reason = ended[sequence.key]
        if reason is StopReason.LENGTH:
            assert len(answer) == MAX_TOKENS
            continue
        assert reason is StopReason.EOS
        text = tokenizer.decode(answer)
        jsonschema.validate(
            json.loads(text),
            SCHEMAS[name],
            cls=jsonschema.Draft202012Validator,
            format_checker=jsonschema.FormatChecker(),
        )
        whole[name] += 1
    assert len(SCHEMAS) >= 20
    # The others ran into max_tokens: the model is small, and some schemas have no bound.
    assert sum(1 for count in whole.values() if count) >= 20, whole


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": record(city={"type": "string", "maxLength": 20}, days={"enum": [1, 2, 3]}),
    },
}


def test_a_cluster_hands_constrained_answers_over_and_calls_tools(
    start_cluster: StartCluster,
) -> None:
    """Token 1 is sampled by the prefill worker, the rest by the decode worker: one grammar."""
    cluster = start_cluster(
        settings={
            "gateway": {"tool_parser": "hermes"},
            "scheduler": {"local_prefill": "never"},
        },
    )
    client = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0)
    ask = partial(
        client.chat.completions.create,
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        max_tokens=120,
        seed=5,
    )
    schema = SCHEMAS["nested"]
    whole = ask(
        n=2,
        logprobs=True,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert len(whole.choices) == 2
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)

    picked = ask(extra_body={"guided_choice": ["sunny ☀", "rainy"]}).choices[0]
    assert picked.message.content in ("sunny ☀", "rainy")

    called = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or ()
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, TOOL["function"]["parameters"])

    name, pieces = "", ""
    for chunk in ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            name += delta.function.name or ""
            pieces += delta.function.arguments or ""
    assert (name, json.loads(pieces)) == ("get_weather", arguments)

    with pytest.raises(openai.BadRequestError, match="look-around"):
        ask(extra_body={"guided_regex": "(?=a)b"})
    # Passes the gateway's check and is too much for a worker: an error of its own, and no other's.
    bomb = {"guided_regex": "((a{1000}){1000}){1000}b"}
    with pytest.raises(openai.BadRequestError, match="complex"):
        ask(extra_body=bomb)
    assert cluster.ask("Say hello.")
