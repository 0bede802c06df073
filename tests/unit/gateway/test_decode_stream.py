"""What a worker says waits for its reader within a bound; past it the answer ends, and says why."""

import pytest

from core.errors import SlowReader, from_failure
from core.messages import Ended, Endpoint, StepOutput, StopReason, Tokens, TransferId, WorkerRef
from gateway.decode_link import DecodeLink, DecodeStream

ME = TransferId(request_id="r", attempt=1)


def tokens(*ids):
    return Tokens(transfer=ME, token_ids=ids)


async def test_what_fits_comes_out_in_order():
    stream = DecodeStream(max_unread_tokens=4)
    assert stream.put(tokens(1, 2)) and stream.put(tokens(3, 4))
    batch, ended = await stream.next()
    assert [each.token_ids for each in batch] == [(1, 2), (3, 4)]
    assert ended is None


async def test_room_comes_back_as_the_reader_reads():
    stream = DecodeStream(max_unread_tokens=2)
    for token_id in range(10):
        assert stream.put(tokens(token_id, token_id))
        await stream.next()


async def test_past_the_bound_the_stream_ends_without_a_gap():
    stream = DecodeStream(max_unread_tokens=3)
    assert stream.put(tokens(1, 2))
    assert not stream.put(tokens(3, 4))
    assert stream.put(tokens(5))  # late, and dropped: the request is being cancelled
    assert stream.put(Ended(transfer=ME, reason=StopReason.CANCELLED))
    batch, ended = await stream.next()
    assert [each.token_ids for each in batch] == [(1, 2)]
    assert ended.reason is StopReason.ERROR
    assert isinstance(from_failure(ended.failure), SlowReader)


@pytest.mark.parametrize("slow", [True, False])
def test_the_worker_is_told_and_its_placement_settled_by_its_answer(monkeypatch, slow):
    worker = WorkerRef(name="d", incarnation="1")
    settled, said = [], []
    link = DecodeLink(
        Endpoint(worker=worker, address="unix:x"),
        worker,
        max_unread_tokens=2,
        on_ended=settled.append,
        on_down=lambda link: None,
    )
    monkeypatch.setattr(link, "_say", said.append)
    link._streams[ME] = DecodeStream(max_unread_tokens=2)
    link._received(StepOutput(tokens=(tokens(*range(3 if slow else 2)),)))
    assert [cancel.transfer for cancel in said] == ([ME] if slow else [])
    assert settled == []
    link._received(StepOutput(ended=(Ended(transfer=ME, reason=StopReason.CANCELLED),)))
    assert settled == [ME]
