"""The bodies of /tokenize and /detokenize, in the shapes that vLLM gave these routes.

A text is tokenised as /v1/completions reads it and a conversation as /v1/chat/completions does.
`model` may be left out where one model is served, as clients of these routes do.
"""

from dataclasses import dataclass
from typing import Self

from pydantic import Field

from core.errors import InvalidRequest
from gateway import openai_fields
from gateway.inputs import ChatInput, CompletionInput
from gateway.json_body import parse_object
from gateway.openai_fields import Passes
from gateway.openai_request import sift_messages, sift_tools
from gateway.openai_schema import Message, messages_input
from gateway.openai_tools import ToolBody, tools_input
from gateway.strict_body import StrictBody, validate

# What other servers take here and this one does not, but for the values that ask for nothing.
UNSUPPORTED_TOKENIZE: dict[str, Passes] = {
    "add_generation_prompt": Passes(values=(True,)),
    "continue_final_message": Passes(values=(False,)),
    "chat_template": Passes(),
    "chat_template_kwargs": Passes(),
    "mm_processor_kwargs": Passes(),
    "return_assistant_tokens_mask": Passes(values=(False,)),
}


class TokenizeBody(StrictBody):
    model: str | None = Field(None, description="Default: the model that is served.")
    prompt: str | None = Field(None, description="A text. Either this or messages.")
    messages: list[Message] | None = Field(None, description="A conversation.")
    tools: list[ToolBody] | None = Field(None, description="With messages: its tools.")
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the text begins with what the tokenizer puts before every text. "
        "Default true. The template alone decides for messages: only false or null with them.",
    )
    return_token_strs: bool | None = Field(None, description="Default false.")


class DetokenizeBody(StrictBody):
    model: str | None = Field(None, description="Default: the model that is served.")
    tokens: list[int] = Field(description="Token ids, at most a context window of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """What a body asks for, and the unknown fields that were dropped (a header's value)."""

    input: ChatInput | CompletionInput
    add_special_tokens: bool
    return_token_strs: bool
    ignored: str | None

    @classmethod
    def read(cls, raw: bytes, *, served: str, strict: bool) -> Self:
        """Raises InvalidRequest, or a kind of it, for whatever is wrong with the body."""
        values = parse_object(raw)
        ignored = [*openai_fields.sift(values, TokenizeBody.served(), UNSUPPORTED_TOKENIZE)]
        ignored += sift_messages(values)
        ignored += sift_tools(values)
        header = openai_fields.tell_ignored(ignored, strict=strict)
        body = validate(TokenizeBody, values)
        return cls(
            input=_input(body, served if body.model is None else body.model),
            add_special_tokens=body.add_special_tokens is not False,
            return_token_strs=bool(body.return_token_strs),
            ignored=header,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """What a body asks for, and the unknown fields that were dropped (a header's value)."""

    model: str
    token_ids: tuple[int, ...]
    ignored: str | None

    @classmethod
    def read(cls, raw: bytes, *, served: str, strict: bool) -> Self:
        """Raises InvalidRequest, or a kind of it, for whatever is wrong with the body."""
        values = parse_object(raw)
        ignored = [*openai_fields.sift(values, DetokenizeBody.served(), {})]
        header = openai_fields.tell_ignored(ignored, strict=strict)
        body = validate(DetokenizeBody, values)
        model = served if body.model is None else body.model
        return cls(model=model, token_ids=tuple(body.tokens), ignored=header)


def _input(body: TokenizeBody, model: str) -> ChatInput | CompletionInput:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("is required, unless there are messages; never both", field="prompt")
    if body.messages is None:
        if body.tools:
            raise InvalidRequest("belong to messages", field="tools")
        return CompletionInput(model=model, prompt=body.prompt or "")
    if body.add_special_tokens:
        raise InvalidRequest(
            "cannot be true with messages: the chat template puts special tokens in",
            field="add_special_tokens",
        )
    return ChatInput(
        model=model,
        messages=messages_input(body.messages),
        tools=tools_input(body.tools, None, None),
    )
