"""The bodies of /v1/chat/completions and /v1/completions, strictly typed.

Types alone are checked here, without conversions: "0.7" and true are no numbers and 1.5 is no
integer. Ranges are checked in `gateway.validation`, for HTTP and gRPC alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from core.errors import InvalidRequest, Unsupported
from gateway.constraints import only_one
from gateway.inputs import ChatInput, ChatMessage, CompletionInput, GrammarInput, SamplingInput
from gateway.json_body import join_path
from gateway.openai_structured import (
    TEXT_OR_OBJECT,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    guided,
)
from gateway.openai_tools import CallBody, ChoiceBody, ToolBody, tools_input
from gateway.strict_body import StrictBody


def _text_or_list(value: Any) -> str | None:
    """Picks a union's branch, so that an error speaks of that branch only."""
    if isinstance(value, str):
        return "@text"
    return "@list" if isinstance(value, list) else None


def _text_or_texts_or_ids(value: Any) -> str | None:
    if isinstance(value, list) and not (value and isinstance(value[0], str)):
        return "@ids"
    return _text_or_list(value)


class StreamOptions(StrictBody):
    include_usage: bool | None = None


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


Text = Annotated[str, Tag("@text")]


class Message(StrictBody):
    """One turn. A list of text parts means their texts joined, with nothing between."""

    role: str
    content: (
        Annotated[Text | Annotated[list[TextPart], Tag("@list")], Discriminator(_text_or_list)]
        | None
    ) = Field(None, description="May be left out with tool_calls.")
    tool_calls: list[CallBody] | None = Field(None, description="An assistant's calls.")
    tool_call_id: str | None = Field(None, description="A tool's: the call that it answers.")
    name: str | None = Field(None, description="A tool's: the function that was called.")

    def to_input(self, path: str) -> ChatMessage:
        """Raises InvalidRequest where there is nothing in it, or calls are none."""
        if self.content is None and not self.tool_calls:
            raise InvalidRequest("is required", field=f"{path}.content")
        calls = enumerate(self.tool_calls or ())
        return ChatMessage(
            role=self.role,
            content=self._text(),
            tool_calls=tuple(each.to_input(f"{path}.tool_calls[{i}]") for i, each in calls),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )

    def _text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


def messages_input(messages: list[Message]) -> tuple[ChatMessage, ...]:
    """A conversation. Raises InvalidRequest naming the message."""
    return tuple(each.to_input(f"messages[{i}]") for i, each in enumerate(messages))


class _Body(StrictBody):
    """What both bodies share. Absent and null mean the same everywhere."""

    model: str
    temperature: float | None = Field(None, description="0 is greedy. [0, 2]. Default 1.")
    top_p: float | None = Field(None, description="(0, 1]. Default 1.")
    top_k: int | None = Field(None, description="-1 and 0 are off. Default off.")
    min_p: float | None = Field(None, description="[0, 1]. Default 0.")
    presence_penalty: float | None = Field(None, description="[-2, 2]. Default 0.")
    frequency_penalty: float | None = Field(None, description="[-2, 2]. Default 0.")
    repetition_penalty: float | None = Field(None, description="(0, 10]. Default 1.")
    seed: int | None = Field(None, description="Signed 64-bit. Default: drawn by the server.")
    max_tokens: int | None = Field(None, description="Default: what the window has left.")
    stop: (
        Annotated[Text | Annotated[list[str], Tag("@list")], Discriminator(_text_or_list)] | None
    ) = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, description="Answers to the one prompt. Default 1.")
    min_tokens: int | None = Field(
        None, description="Neither a stop nor the end of sequence comes before. Default 0."
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Token ids, and what is added to their logits: [-100, 100]."
    )
    priority: int | None = Field(
        None, description="The lower, the earlier; how low depends on the API key. Default 0."
    )
    prompt_logprobs: int | None = Field(
        None,
        description="Tell log probabilities of the prompt's tokens, and of so many likeliest. "
        "Not in a stream.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_timing: bool | None = Field(
        None, description="Where the time to the first token went, beside usage. Default false."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = Field(None, description="A JSON Schema.")
    guided_regex: str | None = Field(None, description="The whole answer matches.")
    guided_choice: list[str] | None = Field(None, description="The answer is one of them.")
    guided_grammar: str | None = Field(None, description="Lark or GBNF.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _sampling(
        self,
        max_tokens: int | None,
        max_tokens_field: str,
        logprobs: int | None,
        logprobs_field: str,
    ) -> SamplingInput:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("needs stream: true", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise Unsupported("is not told in a stream", field="prompt_logprobs")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return SamplingInput(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            max_tokens=max_tokens,
            max_tokens_field=max_tokens_field,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            n=self.n,
            min_tokens=self.min_tokens,
            priority=self.priority,
            logit_bias=tuple(map(_bias, (self.logit_bias or {}).items())),
            logprobs=logprobs,
            logprobs_field=logprobs_field,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _grammar(self) -> GrammarInput | None:
        return only_one(self._grammars())

    def _grammars(self) -> Iterator[GrammarInput]:
        if self.response_format is not None:
            yield from self.response_format.grammars()
        if self.structured_outputs is not None:
            yield from self.structured_outputs.grammars()
        yield from guided(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )


class ChatBody(_Body):
    messages: list[Message]
    tools: list[ToolBody] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("@text")]
            | Annotated[ChoiceBody, Tag("@object")],
            TEXT_OR_OBJECT,
        ]
        | None
    ) = Field(None, description="none, auto, required, or the one to call. Default auto.")
    parallel_tool_calls: bool | None = Field(None, description="Default true.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Tell each token's log probability.")
    top_logprobs: int | None = Field(
        None, description="And those of so many likeliest tokens. Needs logprobs. Default 0."
    )

    def to_input(self) -> ChatInput:
        """Raises InvalidRequest where fields contradict each other."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest("differs from max_tokens", field="max_completion_tokens")
        limit, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
        return ChatInput(
            model=self.model,
            messages=messages_input(self.messages),
            sampling=self._sampling(limit, name, self._logprobs(), "top_logprobs"),
            tools=tools_input(self.tools, self.tool_choice, self.parallel_tool_calls),
            grammar=self._grammar(),
        )

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("needs logprobs: true", field="top_logprobs")
        return None


class CompletionBody(_Body):
    prompt: Annotated[
        Text | Annotated[list[str], Tag("@list")] | Annotated[list[int], Tag("@ids")],
        Discriminator(_text_or_texts_or_ids),
    ] = Field(description="A string, a list with one string, or a list of token ids.")

    logprobs: int | None = Field(
        None, description="Tell log probabilities: each token's, and those of so many likeliest."
    )
    echo: bool | None = Field(None, description="The prompt's text goes before each answer.")
    best_of: int | None = Field(None, description="Only what n is.")

    def to_input(self) -> CompletionInput:
        """Raises InvalidRequest where fields contradict each other."""
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise Unsupported("other than n is not supported by this server", field="best_of")
        return CompletionInput(
            model=self.model,
            prompt=self._prompt(),
            sampling=self._scored(
                self._sampling(self.max_tokens, "max_tokens", self.logprobs, "logprobs")
            ),
            grammar=self._grammar(),
        )

    def _scored(self, sampling: SamplingInput) -> SamplingInput:
        """With the prompt's log probabilities, where it is repeated and they are asked for."""
        if not self.echo or self.logprobs is None:
            return sampling
        if self.prompt_logprobs not in (None, self.logprobs):
            raise InvalidRequest("differs from logprobs, beside echo", field="prompt_logprobs")
        return replace(sampling, prompt_logprobs=self.logprobs, prompt_logprobs_field="logprobs")

    def _prompt(self) -> str | tuple[int, ...]:
        if isinstance(self.prompt, str):
            return self.prompt
        if self.prompt and isinstance(self.prompt[0], str):
            return self.prompt[0]
        return tuple(token_id for token_id in self.prompt if isinstance(token_id, int))


def _bias(entry: tuple[str, float]) -> tuple[int, float]:
    """An entry of logit_bias; JSON writes its ids as strings."""
    name, bias = entry
    if not (name.isascii() and name.isdecimal() and len(name) < 10 and str(int(name)) == name):
        raise InvalidRequest("must be a token id", field=join_path("logit_bias", name))
    return int(name), bias
