"""Which token ends a request, and by what name."""

import pytest

from core.messages import SamplingParams, StopReason, TransferId
from engine.block_manager import BlockManager
from engine.sequence import Sequence
from engine.stopping import stop_reason

EOS = frozenset({2, 3})


def sequence(generated: int, **sampling: object) -> Sequence:
    return Sequence(
        key=TransferId(request_id="r", attempt=0),
        token_ids=[9] * (4 + generated),
        num_prompt_tokens=4,
        lease=BlockManager(1).acquire(1),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("generated", "token_id", "sampling", "reason"),
    [
        (0, 2, {}, StopReason.EOS),
        (0, 3, {}, StopReason.EOS),
        (0, 2, {"ignore_eos": True}, None),
        (0, 7, {"stop_token_ids": (7,)}, StopReason.STOP_SEQUENCE),
        (0, 2, {"ignore_eos": True, "stop_token_ids": (2,)}, StopReason.STOP_SEQUENCE),
        (0, 5, {"max_new_tokens": 1}, StopReason.LENGTH),
        (2, 5, {"max_new_tokens": 3}, StopReason.LENGTH),
        (1, 5, {"max_new_tokens": 3}, None),
        (2, 2, {"max_new_tokens": 3}, StopReason.EOS),
        (2, 2, {"max_new_tokens": 3, "ignore_eos": True}, StopReason.LENGTH),
    ],
)
def test_the_reason_of_a_token(
    generated: int, token_id: int, sampling: dict[str, object], reason: StopReason | None
) -> None:
    assert stop_reason(sequence(generated, **sampling), token_id, EOS) is reason


@pytest.mark.parametrize(("computed", "prompt"), [(4, 4), (-1, 4), (0, 0), (0, 5)])
def test_a_sequence_with_nothing_to_compute_is_refused(computed: int, prompt: int) -> None:
    with pytest.raises(ValueError):
        Sequence(
            key=TransferId(request_id="r", attempt=0),
            token_ids=[1, 2, 3, 4],
            num_prompt_tokens=prompt,
            num_computed_tokens=computed,
            lease=BlockManager(1).acquire(1),
            sampling=SamplingParams(),
        )
