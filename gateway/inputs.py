"""A request as both front ends say it, before its values are checked."""

from dataclasses import dataclass, field
from typing import Any, Literal

from core.messages import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """What a client asked for; None where it asked for nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    # What the client calls it: chat has two names.
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Answers to the one prompt.
    n: int | None = None
    min_tokens: int | None = None
    # (token id, what is added to its logit).
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Log probabilities: of each token and of so many likeliest ones. None: none at all.
    logprobs: int | None = None
    # What the client calls their number: chat has a flag beside it.
    logprobs_field: str = "logprobs"
    # The same of the prompt's tokens, all but the first.
    prompt_logprobs: int | None = None
    prompt_logprobs_field: str = "prompt_logprobs"
    # When it is served, which is no matter of sampling: the lower, the earlier.
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarInput:
    """What the answer must be, and the field that says so."""

    grammar: Grammar
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str | None = field(default=None, repr=False)
    parameters: dict[str, Any] | None = field(default=None, repr=False)
    # Its arguments are held to the schema even where the model is free to call or not.
    strict: bool = False
    # Where the client wrote it, so that an error can say so.
    path: str = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsInput:
    """The tools of a conversation, and whether one must be called: any, or `named`."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model is told of."""
        return () if self.choice == "none" else self.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that stands in a conversation; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str = field(repr=False)
    # An assistant's.
    tool_calls: tuple[ToolCall, ...] = ()
    # A tool's: which call this answers, and the function's name.
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation to answer."""

    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingInput = SamplingInput()
    tools: ToolsInput = ToolsInput()
    grammar: GrammarInput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionInput:
    """A text, or its token ids, to continue."""

    model: str
    prompt: str | tuple[int, ...] = field(repr=False)
    sampling: SamplingInput = SamplingInput()
    grammar: GrammarInput | None = None
