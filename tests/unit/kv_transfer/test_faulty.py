"""The faults that a sender makes on purpose: which, how often, and always the same ones."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from core.errors import ConfigError
from core.messages import TransferId
from kv_transfer.faulty import KINDS, FaultSpec, FaultySender

TRANSFER = TransferId(request_id="request", attempt=1)
DATA = np.arange(100, dtype=np.uint8)


class Recorder:
    """A sender that only notes what it is given."""

    name = "recorder"

    def __init__(self):
        self.written, self.flushed, self.closed = [], 0, 0

    def write(self, transfer, index, target, offset, data):
        assert transfer == TRANSFER
        self.written.append((index, target, offset, bytes(data)))

    def flush(self, *, timeout_s):
        self.flushed += 1

    def close(self):
        self.closed += 1


def run(spec, count=1, stream=""):
    inner = Recorder()
    sender = FaultySender(inner, spec, stream=stream)
    with capture_logs() as logs:
        for index in range(count):
            sender.write(TRANSFER, index, index + 10, 0, DATA)
        sender.flush(timeout_s=1)
    return inner.written, logs, sender


def whole(index):
    return (index, index + 10, 0, bytes(DATA))


def test_without_faults_everything_passes():
    written, logs, sender = run("seed=1", 5)
    assert written == [whole(i) for i in range(5)]
    assert logs == []
    assert sender.name == "recorder"


def test_drop_writes_nothing():
    assert run("drop=1", 3)[0] == []


def test_duplicate_writes_twice():
    assert run("duplicate=1", 2)[0] == [whole(0), whole(0), whole(1), whole(1)]


def test_reorder_writes_after_the_next_and_at_the_flush_at_the_latest():
    assert run("reorder=1", 3)[0] == [whole(1), whole(0), whole(2)]


def test_truncate_writes_the_first_half():
    assert run("truncate=1")[0] == [(0, 10, 0, bytes(DATA[:50]))]


def test_corrupt_changes_one_bit_of_what_is_written_and_none_of_the_source():
    (written,), _, _ = run("corrupt=1")
    changed = np.frombuffer(written[3], np.uint8) ^ np.arange(100, dtype=np.uint8)
    assert int(np.bitwise_count(changed).sum()) == 1
    assert np.array_equal(DATA, np.arange(100, dtype=np.uint8))


@pytest.mark.parametrize("kind", ["delay", "stall"])
def test_delay_and_stall_write_all_the_same(kind):
    written, _, sender = run(f"{kind}=1,{kind}_s=0", 2)
    assert written == [whole(0), whole(1)]
    assert sender.injected == {kind: 2}


def test_each_fault_is_counted_and_logged_with_its_transfer_and_block():
    _, logs, sender = run("corrupt=1", 2)
    assert sender.injected == {"corrupt": 2}
    assert [(e["event"], e["kind"], e["transfer"], e["index"]) for e in logs] == [
        ("fault_injected", "corrupt", "request#1", 0),
        ("fault_injected", "corrupt", "request#1", 1),
    ]


def test_a_seed_and_a_stream_give_the_same_faults_again():
    spec = "drop=0.2,duplicate=0.2,corrupt=0.2,truncate=0.2,reorder=0.2"
    first = run(f"seed=7,{spec}", 200)[0]
    assert first == run(f"seed=7,{spec}", 200)[0]
    assert first != run(f"seed=8,{spec}", 200)[0]
    assert first != run(f"seed=7,{spec}", 200, stream="other")[0]


def test_one_kinds_odds_do_not_shift_anothers():
    alone = run("seed=3,drop=0.3", 100)[2].injected["drop"]
    assert alone == run("seed=3,drop=0.3,corrupt=0.5,delay=0.5,delay_s=0", 100)[2].injected["drop"]


def test_faults_happen_about_as_often_as_asked():
    assert 60 < run("seed=5,drop=0.1", 1000)[2].injected["drop"] < 140


def test_what_is_held_back_is_not_written_after_the_closing():
    inner = Recorder()
    sender = FaultySender(inner, "reorder=1")
    sender.write(TRANSFER, 0, 10, 0, DATA)
    sender.close()
    sender.close()
    assert inner.written == []
    assert inner.closed == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("explode=0.1", "'explode' is none of"),
        ("drop", "drop needs a number"),
        ("drop=often", "drop needs a number"),
        ("drop=1.5", "drop must be from 0 to 1"),
        ("drop=-0.1", "drop must be from 0 to 1"),
        ("drop=nan", "drop must be from 0 to 1"),
        ("stall_s=-1", "stall_s must be from 0"),
        ("seed=0.5", "seed needs a number"),
        ("", "'' is none of"),
    ],
)
def test_a_bad_specification_says_what_is_wrong(spec, message):
    with pytest.raises(ConfigError, match=message):
        FaultSpec.parse(spec)


def test_the_whole_specification_is_read():
    text = ", ".join(f"{kind}=0.25" for kind in KINDS) + ", seed=9, delay_s=0.5, stall_s=2"
    spec = FaultSpec.parse(text)
    assert {kind: getattr(spec, kind) for kind in KINDS} == dict.fromkeys(KINDS, 0.25)
    assert (spec.seed, spec.delay_s, spec.stall_s) == (9, 0.5, 2.0)
