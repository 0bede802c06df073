"""What the HTTP routes answer, as JSON Schema: the half of /openapi.json that nobody parses.

The tests hold every kind of answer against it, so that it stays true.
"""

from dataclasses import fields
from typing import Any

from core.errors import STATUS
from gateway.ledger import Timing

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _COUNT}


def _object(optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}
# For each token: itself, its bytes (a character may span tokens) and the log-probability.
_TOKEN = {"token": _STRING, "logprob": {"type": "number"}, "bytes": _or_null(_list(_COUNT))}
_CHAT_LOGPROBS = _object(
    ("refusal",),
    content=_or_null(_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN))))),
    refusal={"type": "null"},
)
_TEXT_LOGPROBS = _object(
    tokens=_list(_STRING),
    token_logprobs=_list(_or_null({"type": "number"})),
    top_logprobs=_or_null(
        _list(_or_null({"type": "object", "additionalProperties": {"type": "number"}}))
    ),
    text_offset=_list(_COUNT),
)
# For each token of a prompt but the first, by token id: itself, and the likeliest with their rank.
_PROMPT_LOGPROBS = _list(
    _or_null(
        {
            "type": "object",
            "additionalProperties": _object(
                logprob={"type": "number"}, rank=_or_null(_COUNT), decoded_token=_STRING
            ),
        }
    )
)
_TOOL_CALL = _object(
    id=_STRING, type={"const": "function"}, function=_object(name=_STRING, arguments=_STRING)
)
_TOOL_CALL_DELTA = _object(
    ("id", "type"),
    index=_COUNT,
    id=_STRING,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=_STRING, arguments=_STRING),
)
_MESSAGE = _object(
    ("tool_calls",),
    role={"const": "assistant"},
    content=_or_null(_STRING),
    refusal={"type": "null"},
    tool_calls=_list(_TOOL_CALL),
)
_DELTA = _object(
    ("role", "content", "tool_calls"),
    role={"const": "assistant"},
    content=_or_null(_STRING),
    tool_calls=_list(_TOOL_CALL_DELTA),
)


def _answer(kind: str, choice: Schema, *, usage: bool, **more: Schema) -> Schema:
    """An answer, or a chunk of one: a chunk has usage where it was asked for, and null before.

    `more` is there where it was asked for.
    """
    return _object(
        (*more, "timing") if usage else (*more, "usage", "timing"),
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        system_fingerprint=_STRING,
        choices=_list(choice),
        usage=_ref("Usage") if usage else _or_null(_ref("Usage")),
        timing=_ref("Timing"),
        **more,
    )


def _choice(
    logprobs: Schema, *, finished: bool, more: dict[str, Schema] | None = None, **content: Schema
) -> Schema:
    asked = more or {}
    return _object(
        tuple(asked),
        index=_COUNT,
        **asked,
        **content,
        logprobs=_or_null(logprobs),
        finish_reason=_FINISH_REASON if finished else _or_null(_FINISH_REASON),
    )


ANSWERS: dict[str, Schema] = {
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    # Seconds; all but ttft_s and total_s add up to ttft_s.
    "Timing": _object(**{each.name: {"type": "number"} for each in fields(Timing)}),
    "ChatCompletion": _answer(
        "chat.completion",
        _choice(_CHAT_LOGPROBS, finished=True, message=_MESSAGE),
        usage=True,
        prompt_logprobs=_PROMPT_LOGPROBS,
    ),
    "ChatCompletionChunk": _answer(
        "chat.completion.chunk",
        _choice(_CHAT_LOGPROBS, finished=False, delta=_DELTA),
        usage=False,
    ),
    "Completion": _answer(
        "text_completion",
        _choice(
            _TEXT_LOGPROBS, finished=True, more={"prompt_logprobs": _PROMPT_LOGPROBS}, text=_STRING
        ),
        usage=True,
    ),
    "CompletionChunk": _answer(
        "text_completion", _choice(_TEXT_LOGPROBS, finished=False, text=_STRING), usage=False
    ),
    "Tokenized": _object(
        ("token_strs",), count=_COUNT, max_model_len=_COUNT, tokens=_IDS, token_strs=_list(_STRING)
    ),
    "Detokenized": _object(prompt=_STRING),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_STRING,
        context_window=_COUNT,
        alias_of=_or_null(_STRING),
    ),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Version": _object(version=_STRING),
    "Health": _object(status={"const": "ok"}),
    "Readiness": _object(status={"enum": ["ready", "not ready"]}, reason=_STRING),
    # In a stream, after the first byte, the same with the request's id.
    "Error": _object(
        error=_object(
            ("request_id",),
            message=_STRING,
            type={"enum": sorted({status.openai_type for status in STATUS.values()})},
            param=_or_null(_STRING),
            code=_STRING,
            request_id=_STRING,
        )
    ),
}
