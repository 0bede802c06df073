"""Windows: what lands, what counts, what is stale."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.messages import TransferId
from kv_transfer.windows import Windows

TRANSFER = TransferId(request_id="request", attempt=1)
BLOCK_BYTES = 24


@pytest.fixture
def windows():
    return Windows(np.zeros((4, BLOCK_BYTES), dtype=np.uint8))


def land(windows, index, offset, size, *, transfer=TRANSFER, byte=7):
    with windows.place(transfer, index, offset, size) as place:
        if place is not None:
            place[:] = bytes([byte]) * size
    windows.landed(transfer, index, offset, size)
    return place is not None


async def test_a_window_is_full_when_each_byte_has_come(windows):
    windows.open(TRANSFER, (3, 1))
    assert land(windows, 0, 0, BLOCK_BYTES)
    assert land(windows, 1, 10, 14)
    assert not await windows.arrived(TRANSFER, timeout_s=0)
    assert land(windows, 1, 0, 10)
    assert await windows.arrived(TRANSFER, timeout_s=0)


async def test_who_waits_is_woken_by_the_last_byte(windows):
    windows.open(TRANSFER, (0,))
    waiting = asyncio.create_task(windows.arrived(TRANSFER, timeout_s=10))
    await asyncio.sleep(0)
    await asyncio.to_thread(land, windows, 0, 0, BLOCK_BYTES)
    assert await waiting


async def test_a_window_of_no_blocks_is_full(windows):
    windows.open(TRANSFER, ())
    assert await windows.arrived(TRANSFER, timeout_s=0)


async def test_an_unknown_transfer_never_arrives(windows):
    assert not await windows.arrived(TRANSFER, timeout_s=10)


@pytest.mark.parametrize(
    ("index", "offset", "size"),
    [(1, 0, 1), (0, 0, 0), (0, BLOCK_BYTES, 1), (0, 1, BLOCK_BYTES), (0, 0, 2**32)],
)
def test_what_lies_outside_the_window_is_stale(windows, index, offset, size):
    windows.open(TRANSFER, (2,))
    with windows.place(TRANSFER, index, offset, size) as place:
        assert place is None
    windows.landed(TRANSFER, index, offset, size)
    assert windows.counters() == {"stale_frames": 1, "bytes_received": 0}


def test_nothing_is_placed_after_the_closing(windows):
    windows.open(TRANSFER, (2,))
    windows.close(TRANSFER)
    windows.close(TRANSFER)
    assert not land(windows, 0, 0, BLOCK_BYTES)
    assert not land(windows, 0, 0, 1, transfer=TransferId(request_id="request", attempt=2))
    assert windows.num_stale == 2


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, BLOCK_BYTES - 1), st.integers(1, BLOCK_BYTES)), max_size=30
    )
)
def test_pieces_count_as_a_plain_list_of_bytes_says(pieces):
    """Against one flag per byte."""
    windows = Windows(np.zeros((1, BLOCK_BYTES), dtype=np.uint8))
    windows.open(TRANSFER, (0,))
    came = [False] * BLOCK_BYTES
    for offset, size in pieces:
        fits = offset + size <= BLOCK_BYTES and not any(came[offset : offset + size])
        assert land(windows, 0, offset, size) is fits
        if fits:
            came[offset : offset + size] = [True] * size
    assert windows.num_bytes == sum(came)
    assert asyncio.run(windows.arrived(TRANSFER, timeout_s=0)) is all(came)
