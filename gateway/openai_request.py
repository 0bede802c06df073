"""One HTTP body to one request: parse, sift, type-check."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from core.errors import Unsupported
from gateway import openai_fields
from gateway.inputs import ChatInput, CompletionInput
from gateway.json_body import join_path, parse_object
from gateway.openai_schema import ChatBody, CompletionBody, Message, StreamOptions
from gateway.openai_structured import (
    JsonSchemaFormat,
    ResponseFormat,
    refuse_other_constraints,
)
from gateway.openai_tools import (
    CallBody,
    CalledBody,
    ChoiceBody,
    FunctionBody,
    NameBody,
    ToolBody,
)
from gateway.strict_body import StrictBody, validate

R = TypeVar("R", ChatInput, CompletionInput)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest(Generic[R]):
    """What a body asks for, and the unknown fields that were dropped (a header's value)."""

    input: R
    stream: bool
    include_usage: bool
    include_timing: bool
    ignored: str | None
    # Whether the prompt's log probabilities are told beside the answers.
    prompt_logprobs: bool
    # A completion's prompt goes before the answer.
    echo: bool = False


def read_chat(raw: bytes, *, strict: bool) -> HttpRequest[ChatInput]:
    """Raises InvalidRequest, or a kind of it, for whatever is wrong with the body."""
    values = parse_object(raw)
    ignored = [*_sift_body(values, ChatBody, openai_fields.UNSUPPORTED_CHAT)]
    ignored += sift_messages(values)
    ignored += sift_tools(values)
    header = openai_fields.tell_ignored(ignored, strict=strict)
    body = validate(ChatBody, values)
    return HttpRequest(
        input=body.to_input(),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        include_timing=bool(body.include_timing),
        prompt_logprobs=body.prompt_logprobs is not None,
        ignored=header,
    )


def read_completion(raw: bytes, *, strict: bool) -> HttpRequest[CompletionInput]:
    """Raises InvalidRequest, or a kind of it, for whatever is wrong with the body."""
    values = parse_object(raw)
    ignored = list(_sift_body(values, CompletionBody, openai_fields.UNSUPPORTED_COMPLETION))
    header = openai_fields.tell_ignored(ignored, strict=strict)
    _refuse_many_prompts(values.get("prompt"))
    body = validate(CompletionBody, values)
    return HttpRequest(
        input=body.to_input(),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        include_timing=bool(body.include_timing),
        prompt_logprobs=body.prompt_logprobs is not None,
        ignored=header,
        echo=bool(body.echo),
    )


def _sift_body(
    values: dict[str, Any],
    kind: type[ChatBody] | type[CompletionBody],
    table: dict[str, openai_fields.Passes],
) -> Iterator[str]:
    yield from openai_fields.sift(values, kind.served(), table)
    known = openai_fields.UNSUPPORTED_STREAM_OPTIONS
    yield from _sift(values, "stream_options", StreamOptions, "", known)
    refuse_other_constraints(values)
    yield from _sift(values, "response_format", ResponseFormat)
    if isinstance(form := values.get("response_format"), dict):
        yield from _sift(form, "json_schema", JsonSchemaFormat, "response_format")


def sift_messages(values: dict[str, Any]) -> Iterator[str]:
    """`openai_fields.sift` for every message and content part of a body."""
    messages = values.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        path = f"messages[{i}]"
        known = openai_fields.UNSUPPORTED_MESSAGE
        yield from openai_fields.sift(message, Message.served(), known, path)
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                where = f"{path}.content[{j}]"
                openai_fields.refuse_part(part, where)
                yield from openai_fields.sift(part, openai_fields.PART_FIELDS, {}, where)
        calls = message.get("tool_calls")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):
            yield from _sift_function(call, f"{path}.tool_calls[{j}]", CallBody, CalledBody)


def sift_tools(values: dict[str, Any]) -> Iterator[str]:
    """`openai_fields.sift` for every tool of a body, and for the choice among them."""
    tools = values.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        yield from _sift_function(tool, f"tools[{i}]", ToolBody, FunctionBody)
    yield from _sift_function(values.get("tool_choice"), "tool_choice", ChoiceBody, NameBody)


def _sift_function(
    value: Any, path: str, outer: type[StrictBody], inner: type[StrictBody]
) -> Iterator[str]:
    if isinstance(value, dict):
        yield from openai_fields.sift(value, outer.served(), {}, path)
        yield from _sift(value, "function", inner, path)


def _sift(
    values: dict[str, Any],
    name: str,
    kind: type[StrictBody],
    path: str = "",
    known: dict[str, openai_fields.Passes] | None = None,
) -> Iterator[str]:
    """One object in another."""
    if isinstance(value := values.get(name), dict):
        where = join_path(path, name)
        yield from openai_fields.sift(value, kind.served(), known or {}, where)


def _refuse_many_prompts(prompt: Any) -> None:
    """Several prompts are OpenAI's; so is a list of lists of token ids, even with one inside."""
    if not isinstance(prompt, list) or not prompt:
        return
    if isinstance(prompt[0], list) or (isinstance(prompt[0], str) and len(prompt) > 1):
        raise Unsupported("several prompts in one request are not supported", field="prompt")
