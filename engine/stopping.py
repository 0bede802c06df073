"""When a token ends its request. Prefill and decode workers ask the same function."""

from collections.abc import Collection

from core.messages import StopReason
from engine.sequence import Sequence


def stop_reason(
    sequence: Sequence, token_id: int, eos_token_ids: Collection[int]
) -> StopReason | None:
    """Why `token_id`, sampled but not yet appended to `sequence`, is its last; None if it is not.

    A token that is both an end-of-sequence token and the last that fits ends by EOS.
    """
    sampling = sequence.sampling
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return StopReason.EOS
    if token_id in sampling.stop_token_ids:
        return StopReason.STOP_SEQUENCE
    if sequence.num_generated_tokens + 1 >= sampling.max_new_tokens:
        return StopReason.LENGTH
    return None
