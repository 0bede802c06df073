"""A digest is that of these bytes, in this place, of this attempt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.messages import TransferId
from kv_transfer.digest import block_digest, block_digests

TRANSFER = TransferId(request_id="r", attempt=1)


@given(st.integers(0, 4095), st.integers(1, 255))
def test_one_changed_byte_changes_the_digest(place, change):
    block = np.arange(4096, dtype=np.uint32).astype(np.uint8)
    before = block_digest(TRANSFER, 0, block)
    block[place] ^= change
    assert block_digest(TRANSFER, 0, block) != before


def test_equal_bytes_elsewhere_have_other_digests():
    block = np.zeros(64, dtype=np.uint8)
    other_request = TransferId(request_id="s", attempt=1)
    other_attempt = TransferId(request_id="r", attempt=2)
    digests = {
        block_digest(TRANSFER, 0, block),
        block_digest(TRANSFER, 1, block),
        block_digest(other_request, 0, block),
        block_digest(other_attempt, 0, block),
    }
    assert len(digests) == 4


def test_swapped_blocks_are_noticed():
    pool = np.arange(128, dtype=np.uint8).reshape(2, 64)
    assert block_digests(TRANSFER, pool, (0, 1)) != block_digests(TRANSFER, pool, (1, 0))
