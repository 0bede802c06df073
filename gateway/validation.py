"""The checks that both front ends share: the same ranges, field names and words for HTTP and gRPC.

Everything here raises InvalidRequest (or a kind of it) naming the field, ModelNotFound, or returns
values that the engine takes as they are. Field names are those of the HTTP body.
"""

import math
import secrets
from dataclasses import dataclass
from typing import TypeVar

from core.errors import ContextTooLong, InvalidRequest, Unsupported
from core.messages import SamplingParams, TokenBias
from gateway.inputs import ChatInput, ChatMessage, CompletionInput, SamplingInput
from gateway.ranges import RANGES

ROLES = ("system", "user", "assistant", "tool", "developer")
T = TypeVar("T")
# The fields of SamplingInput that have a range and one name.
_RANGED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "n", "min_tokens", "priority"),
)
_MAX_BIAS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests for a model are held against. `window` counts prompt and answer, in tokens.

    `max_prompt_tokens` None: as many as leave room for one of the answer. `default_max_tokens` is
    the longest answer to a request that does not say; None: what the window has left.
    """

    served_name: str
    window: int
    vocab_size: int
    max_stop_strings: int
    max_stop_chars: int
    max_choices: int = 16
    max_logprobs: int = 20
    max_prompt_logprobs: int = 2**18
    max_logit_bias: int = 1024
    max_prompt_tokens: int | None = None
    default_max_tokens: int | None = None

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt, at most."""
        return min(self.window - 1, self.max_prompt_tokens or self.window - 1)


def check_chat(request: ChatInput, limits: Limits) -> None:
    """Everything about a chat that can be known before it is rendered."""
    if not request.messages:
        raise InvalidRequest("must hold at least one message", field="messages")
    if len(request.messages) > limits.longest_prompt:  # each message is a token at the very least
        raise too_long("messages", len(request.messages), limits, exact=False)
    for i, message in enumerate(request.messages):
        _check_message(message, f"messages[{i}]")
    _check_sampling(request.sampling, limits)


def check_completion(request: CompletionInput, limits: Limits) -> None:
    """Everything about a completion that can be known before it is tokenised."""
    if not request.prompt:
        raise InvalidRequest("must not be empty", field="prompt")
    if not isinstance(request.prompt, str):
        if len(request.prompt) > limits.longest_prompt:
            raise too_long("prompt", len(request.prompt), limits)
        _check_token_ids(request.prompt, "prompt", limits)
    _check_sampling(request.sampling, limits)


def resolve_sampling(
    asked: SamplingInput, limits: Limits, *, prompt_tokens: int, prompt_field: str
) -> SamplingParams:
    """Every value filled in. Prompt and answer must fit the window together: there is no clamping.

    `max_tokens` absent is the operator's default, else whatever the window has left; a seed absent
    is drawn here. A `top_k` of -1 is off, and one above the vocabulary is the vocabulary.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("has no tokens", field=prompt_field)
    if prompt_tokens > limits.longest_prompt:
        raise too_long(prompt_field, prompt_tokens, limits)
    left = limits.window - prompt_tokens
    if asked.max_tokens is not None and asked.max_tokens > left:
        raise ContextTooLong(
            f"the prompt's {prompt_tokens} tokens and {asked.max_tokens} more do not fit the "
            f"context window of {limits.window} tokens",
            field=asked.max_tokens_field,
        )
    _check_prompt_logprobs(asked, limits, prompt_tokens)
    default = left if limits.default_max_tokens is None else min(left, limits.default_max_tokens)
    max_new_tokens = default if asked.max_tokens is None else asked.max_tokens
    if asked.min_tokens is not None and asked.min_tokens > max_new_tokens:
        raise InvalidRequest(
            f"must not be above the most tokens of the answer, {max_new_tokens}", field="min_tokens"
        )
    return SamplingParams(
        temperature=_or_default(asked, "temperature"),
        top_k=min(max(_or(asked.top_k, 0), 0), limits.vocab_size),
        top_p=_or_default(asked, "top_p"),
        min_p=_or_default(asked, "min_p"),
        presence_penalty=_or_default(asked, "presence_penalty"),
        frequency_penalty=_or_default(asked, "frequency_penalty"),
        repetition_penalty=_or_default(asked, "repetition_penalty"),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys(asked.stop_token_ids)),
        ignore_eos=asked.ignore_eos,
        min_tokens=asked.min_tokens or 0,
        logit_bias=tuple(
            TokenBias(token_id=token_id, bias=bias) for token_id, bias in asked.logit_bias
        ),
        logprobs=asked.logprobs is not None,
        top_logprobs=min(asked.logprobs or 0, limits.vocab_size),
        prompt_logprobs=asked.prompt_logprobs is not None,
        top_prompt_logprobs=min(asked.prompt_logprobs or 0, limits.vocab_size),
    )


def too_long(
    field: str, prompt_tokens: int, limits: Limits, *, exact: bool = True
) -> ContextTooLong:
    """A prompt that leaves no room for an answer, or is longer than the operator lets it be."""
    bound = "" if exact else "at least "
    most = (
        f"the context window of {limits.window} tokens must hold it and the answer"
        if limits.longest_prompt == limits.window - 1
        else f"a prompt may have {limits.longest_prompt}"
    )
    return ContextTooLong(
        f"the prompt has {bound}{prompt_tokens} tokens, the chat template's own included; {most}",
        field=field,
    )


def check_token_ids(ids: tuple[int, ...], field: str, limits: Limits) -> None:
    """Ids to make text of: of the vocabulary, and no more than a window holds."""
    if len(ids) > limits.window:
        raise InvalidRequest(f"may hold at most {limits.window} ids", field=field)
    _check_token_ids(ids, field, limits)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _or_default(asked: SamplingInput, field: str) -> float:
    value, default = getattr(asked, field), RANGES[field].default
    assert default is not None
    return float(default if value is None else value)


def _check_message(message: ChatMessage, path: str) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(f"must be one of {', '.join(ROLES)}", field=f"{path}.role")
    if not (message.content or message.tool_calls or message.role == "tool"):
        raise InvalidRequest("must not be empty", field=f"{path}.content")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("only an assistant calls tools", field=f"{path}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest("only a tool answers a call", field=f"{path}.tool_call_id")
    if message.name is not None and message.role != "tool":
        raise Unsupported("is served for tools alone", field=f"{path}.name")


def _check_sampling(asked: SamplingInput, limits: Limits) -> None:
    for field in _RANGED:
        RANGES[field].check(field, getattr(asked, field))
    RANGES[asked.max_tokens_field].check(asked.max_tokens_field, asked.max_tokens)
    _check_stops(asked.stop, limits)
    if len(asked.stop_token_ids) > limits.vocab_size:
        raise InvalidRequest("holds more ids than the vocabulary", field="stop_token_ids")
    _check_token_ids(asked.stop_token_ids, "stop_token_ids", limits)
    if asked.n is not None and asked.n > limits.max_choices:
        raise InvalidRequest(f"must be at most {limits.max_choices}", field="n")
    _check_logprobs(asked, limits)
    _check_logit_bias(asked.logit_bias, limits)


def _check_logprobs(asked: SamplingInput, limits: Limits) -> None:
    for field, count in (
        (asked.logprobs_field, asked.logprobs),
        (asked.prompt_logprobs_field, asked.prompt_logprobs),
    ):
        RANGES[field].check(field, count)
        if count is not None and count > limits.max_logprobs:
            raise InvalidRequest(f"must be at most {limits.max_logprobs}", field=field)


def _check_prompt_logprobs(asked: SamplingInput, limits: Limits, prompt_tokens: int) -> None:
    if asked.prompt_logprobs is None:
        return
    count = prompt_tokens * (1 + asked.prompt_logprobs)
    if count > limits.max_prompt_logprobs:
        raise InvalidRequest(
            f"the prompt's {prompt_tokens} tokens would have {count} log probabilities; at most "
            f"{limits.max_prompt_logprobs} are told",
            field=asked.prompt_logprobs_field,
        )


def _check_logit_bias(biases: tuple[tuple[int, float], ...], limits: Limits) -> None:
    if len(biases) > limits.max_logit_bias:
        raise InvalidRequest(f"may hold at most {limits.max_logit_bias} ids", field="logit_bias")
    for token_id, bias in biases:
        field = f"logit_bias.{token_id}"
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"must be a token id, from 0 up to {limits.vocab_size - 1}", field=field
            )
        if not math.isfinite(bias) or abs(bias) > _MAX_BIAS:
            raise InvalidRequest(
                f"must be at least -{_MAX_BIAS} and at most {_MAX_BIAS}", field=field
            )


def _check_stops(stops: tuple[str, ...], limits: Limits) -> None:
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequest(f"may hold at most {limits.max_stop_strings} strings", field="stop")
    for stop in stops:
        if not stop:
            raise InvalidRequest("must not hold an empty string", field="stop")
        if len(stop) > limits.max_stop_chars:
            raise InvalidRequest(
                f"may hold strings of at most {limits.max_stop_chars} characters", field="stop"
            )


def _check_token_ids(ids: tuple[int, ...], field: str, limits: Limits) -> None:
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"must be a token id, from 0 up to {limits.vocab_size - 1}", field=f"{field}[{i}]"
            )
