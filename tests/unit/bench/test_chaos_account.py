"""What counts as a promise kept: the account must tell a missed corruption from a detected one."""

import grpc
import pytest

from bench.chaos_account import Account, num_wrong
from bench.streams import TokenStream, generate
from protos.tandem.v1 import inference_pb2

EXPECTED = [5, 6, 7, 8]


def stream(request_id: str, token_ids: list[int], code: grpc.StatusCode = grpc.StatusCode.OK):
    """One that ended."""
    made = TokenStream(generate("m", [1]))
    made.token_ids, made.code, made.num_terminals = token_ids, code, 1
    if code is grpc.StatusCode.OK:
        made.finished = inference_pb2.Finished(
            stop_reason=inference_pb2.STOP_REASON_LENGTH, request_id=request_id
        )
    return made


def corrupt(transfer: str) -> dict[str, object]:
    return {"event": "fault_injected", "kind": "corrupt", "transfer": transfer, "index": 0}


def mismatch(transfer: str) -> dict[str, object]:
    return {"event": "kv_digest_mismatch", "request": transfer}


def retry(transfer: str, code: str, tokens_sent: int = 0) -> dict[str, object]:
    return {"event": "retrying", "request": transfer, "code": code, "tokens_sent": tokens_sent}


def account(streams: list[TokenStream], events: list[dict[str, object]]) -> Account:
    made = Account()
    made.add_run(streams, [EXPECTED] * len(streams), events)
    return made


def test_a_corruption_that_was_noticed_and_retried_is_detected():
    found = account([stream("a", EXPECTED)], [corrupt("a#1"), mismatch("a#1"), retry("a#1", "x")])
    assert (found.verified, found.detected, found.sound) == (1, 1, True)


def test_a_corruption_that_was_decoded_is_missed():
    found = account([stream("a", EXPECTED)], [corrupt("a#1")])
    assert (found.verified, found.detected, found.sound) == (1, 0, False)


def test_a_corruption_that_gave_tokens_before_its_worker_was_lost_is_missed():
    events = [corrupt("a#1"), retry("a#1", "worker_lost", tokens_sent=2)]
    found = account([stream("a", EXPECTED)], events)
    assert (found.verified, found.detected) == (1, 0)


def test_a_corruption_of_a_transfer_that_failed_by_itself_was_never_verified():
    events = [corrupt("a#1"), retry("a#1", "worker_lost")]
    found = account([stream("a", EXPECTED)], events)
    assert (found.corrupted_transfers, found.verified, found.detected) == (1, 0, 0)
    assert not found.sound, "nothing was put to the test"


@pytest.mark.parametrize(
    ("token_ids", "code", "wrong"),
    [
        (EXPECTED, grpc.StatusCode.OK, 0),
        ([5, 9, 7, 8], grpc.StatusCode.OK, 1),
        ([5, 6], grpc.StatusCode.OK, 2),
        ([*EXPECTED, 9], grpc.StatusCode.OK, 1),
        ([5, 6], grpc.StatusCode.DATA_LOSS, 0),
        ([5, 9], grpc.StatusCode.DATA_LOSS, 1),
    ],
)
def test_wrong_surplus_and_missing_tokens_are_wrong(token_ids, code, wrong):
    assert num_wrong(stream("a", token_ids, code), EXPECTED) == wrong


def test_a_stream_that_ends_twice_is_not_sound():
    twice = stream("a", EXPECTED)
    twice.num_terminals = 2
    found = account([twice], [corrupt("a#1"), mismatch("a#1"), retry("a#1", "x")])
    assert (found.not_ended_once, found.sound) == (1, False)
