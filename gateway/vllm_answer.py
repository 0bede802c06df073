"""One choice of an answer in vllm.grpc.engine's messages: in chunks, and in the end whole."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from core.messages import StopReason, TokenLogprobs
from gateway.choice_text import ChoiceEnd, TextEvent
from gateway.text_stream import Usage

# The package has no types.
pb: Any = vllm_engine_pb2

_FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.STOP_SEQUENCE: "stop",
    StopReason.LENGTH: "length",
    StopReason.CANCELLED: "abort",
}
ABORTED = ChoiceEnd(stop_reason=StopReason.CANCELLED)


class VllmChoice:
    """Collects the tokens of one choice. `input_logprobs` is the prompt's, or None."""

    def __init__(self, index: int, input_logprobs: Any) -> None:
        self._index = index
        self._input_logprobs = input_logprobs
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, event: TextEvent) -> None:
        """More tokens came."""
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs

    def chunk(self, event: TextEvent, usage: Usage) -> Any:
        """These tokens of an answer that goes on. Their count is the chunk's own."""
        first = len(self._token_ids) == len(event.token_ids)
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                index=self._index,
                token_ids=event.token_ids,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=len(event.token_ids),
                cached_tokens=usage.cached_tokens,
                output_logprobs=_output(event.token_ids, event.logprobs),
                input_logprobs=self._input_logprobs if first else None,
            )
        )

    def complete(self, end: ChoiceEnd, usage: Usage) -> Any:
        """The end of the choice, with all of its tokens."""
        last = pb.GenerateComplete(
            index=self._index,
            output_ids=self._token_ids,
            finish_reason=_FINISH_REASONS[end.stop_reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=usage.cached_tokens,
            output_logprobs=_output(self._token_ids, self._logprobs),
            input_logprobs=self._input_logprobs,
        )
        if end.stop is not None:
            last.matched_stop_str = end.stop
        elif end.stop_token_id is not None:
            last.matched_token_id = end.stop_token_id
        return pb.GenerateResponse(complete=last)


def input_logprobs(token_ids: Sequence[int], told: Sequence[TokenLogprobs]) -> Any:
    """Those of a prompt's tokens: the first has none, and an empty list of likeliest ones."""
    values = [pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=each.logprob) for each in told)]
    top = [pb.TopLogProbs(), *map(_top, told)]
    return pb.InputLogProbs(token_logprobs=values, token_ids=token_ids, top_logprobs=top)


def _output(token_ids: Sequence[int], told: Sequence[TokenLogprobs]) -> Any:
    """None where they were not asked for."""
    if not told:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in told],
        token_ids=token_ids,
        top_logprobs=map(_top, told),
    )


def _top(told: TokenLogprobs) -> Any:
    return pb.TopLogProbs(values=told.top_logprobs, token_ids=told.top_token_ids)
