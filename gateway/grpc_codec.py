"""tandem.v1's messages in the words that both front ends share, and answers in tandem.v1's."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from core.codec import to_proto
from core.errors import InvalidRequest
from core.messages import StopReason, TokenLogprobs
from gateway.choice_text import TextEvent
from gateway.grpc_tools import answer_format, calls_input, fill_pieces, told_tools, tools_input
from gateway.inputs import ChatInput, ChatMessage, CompletionInput, SamplingInput
from gateway.ledger import Timing
from gateway.loaded_model import ModelInfo
from gateway.text_stream import DoneEvent, Usage
from gateway.tools.reading import CallReading
from protos.tandem.v1 import inference_pb2 as pb

# Tokens of a prompt in one message: with the most likeliest ones a tenth of what clients take.
_PROMPT_LOGPROBS_AT_ONCE = 1024


def chat_input(request: pb.ChatRequest) -> ChatInput:
    """A conversation to answer. Raises InvalidRequest where fields contradict each other."""
    return ChatInput(
        model=request.model,
        messages=_messages(request),
        sampling=sampling_input(request.sampling),
        tools=tools_input(request),
        grammar=answer_format(request),
    )


def completion_input(request: pb.GenerateRequest) -> CompletionInput:
    """A text to continue. An absent prompt is an empty one. Raises InvalidRequest."""
    ids = request.WhichOneof("prompt") == "token_ids"
    return CompletionInput(
        model=request.model,
        prompt=tuple(request.token_ids.ids) if ids else request.text,
        sampling=sampling_input(request.sampling),
        grammar=answer_format(request),
    )


def prompt_input(request: pb.TokenizeRequest) -> ChatInput | CompletionInput:
    """A prompt to tokenise. Raises InvalidRequest where there is none."""
    if request.WhichOneof("input") is None:
        raise InvalidRequest("must hold a text or a conversation", field="input")
    if request.WhichOneof("input") == "conversation":
        spoken = request.conversation
        tools = told_tools(spoken.tools)
        return ChatInput(model=request.model, messages=_messages(spoken), tools=tools)
    return CompletionInput(model=request.model, prompt=request.text)


def sampling_input(options: pb.SamplingOptions) -> SamplingInput:
    """What the client asked for. An absent field is an absent one, and zero is a value."""
    message: Any = options
    present: dict[str, Any] = {
        name: tuple(getattr(message, name)) if repeated else getattr(message, name)
        for name, repeated in _SAMPLING_FIELDS
        if repeated or message.HasField(name)
    }
    present["logit_bias"] = tuple(message.logit_bias.items())  # a map: its entries, not its keys
    return SamplingInput(**present)


def fill_delta(delta: pb.TextDelta, event: TextEvent, readings: Sequence[CallReading] = ()) -> None:
    """Writes an event of an answer into an empty message. `readings`, one a choice, find calls."""
    if readings:
        fill_pieces(delta, readings[event.choice], event.text, last=event.end is not None)
    else:
        delta.text = event.text
    delta.token_ids.extend(event.token_ids)
    if event.choice:
        delta.choice = event.choice
    if event.logprobs:
        delta.logprobs.extend(map(_logprobs, event.logprobs))
    if (end := event.end) is not None:
        delta.stop_reason = pb.StopReason.ValueType(end.stop_reason)
        if end.stop is not None:
            delta.stop = end.stop
        elif end.stop_token_id is not None:
            delta.stop_token_id = end.stop_token_id


def prompt_logprobs(told: Sequence[TokenLogprobs]) -> Iterator[pb.PromptLogprobs]:
    """A prompt's log probabilities from its second token on, in messages of bounded size."""
    for first in range(0, len(told), _PROMPT_LOGPROBS_AT_ONCE):
        piece = told[first : first + _PROMPT_LOGPROBS_AT_ONCE]
        yield pb.PromptLogprobs(start=first + 1, logprobs=map(_logprobs, piece))


def finished(done: DoneEvent, request_id: str) -> pb.Finished:
    """The last event of an answer."""
    last = pb.Finished(
        stop_reason=pb.StopReason.ValueType(done.stop_reason),
        usage=to_proto(pb.Usage, done.usage),
        timing=to_proto(pb.Timing, done.timing),
        request_id=request_id,
    )
    if done.stop is not None:
        last.stop = done.stop
    elif done.stop_token_id is not None:
        last.stop_token_id = done.stop_token_id
    return last


def cancelled(usage: Usage, timing: Timing, request_id: str) -> pb.Finished:
    """The last event of an answer that its caller cancelled."""
    done = DoneEvent(stop_reason=StopReason.CANCELLED, usage=usage, timing=timing)
    return finished(done, request_id)


def model_proto(model: ModelInfo, name: str) -> pb.Model:
    """A model as it is listed by one of its names."""
    return pb.Model(
        id=name,
        alias_of="" if name == model.id else model.id,
        created_unix_s=model.created_unix_s,
        context_window=model.context_window,
    )


def _logprobs(told: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=told.logprob, top_token_ids=told.top_token_ids, top_logprobs=told.top_logprobs
    )


def _messages(of: pb.ChatRequest | pb.Conversation) -> tuple[ChatMessage, ...]:
    return tuple(_message(each, f"messages[{i}]") for i, each in enumerate(of.messages))


def _message(message: pb.ChatMessage, path: str) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=calls_input(message, path) if message.tool_calls else (),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        name=message.name if message.HasField("name") else None,
    )


def _sampling_fields() -> tuple[tuple[str, bool], ...]:
    """(name, whether repeated) of each option of ours, which SamplingInput must know by that name.

    An option that both have needs no line here: it passes to the checks that HTTP has too.
    """
    options: Any = pb.SamplingOptions.DESCRIPTOR.fields
    unknown = {option.name for option in options} - {
        field.name for field in dataclasses.fields(SamplingInput)
    }
    if unknown:
        raise TypeError(f"SamplingInput lacks {', '.join(sorted(unknown))} of SamplingOptions")
    return tuple((option.name, option.is_repeated) for option in options)


_SAMPLING_FIELDS = _sampling_fields()
