"""What came of requests that ran through faults: from their streams and the cluster's log."""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.streams import TokenStream

EVENTS = (
    "fault_injected",
    "kv_digest_mismatch",
    "retrying",
    "ended unexpectedly; it will be restarted",
)
_FAULT, _MISMATCH, _RETRY, _RESTART = EVENTS


@dataclass(kw_only=True)
class Account:
    """Sums over any number of runs.

    A transfer into which a corruption was injected counts as verified where its digests were
    compared; it may have failed for another reason before. It is detected where they differed, and
    missed where its blocks were decoded.
    """

    requests: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    not_ended_once: int = 0
    wrong_tokens: int = 0
    lost_blocks: int = 0
    unbalanced: int = 0
    max_quarantined: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    corrupted_transfers: int = 0
    verified: int = 0
    detected: int = 0
    retries: collections.Counter[str] = field(default_factory=collections.Counter)
    restarts: int = 0

    @property
    def sound(self) -> bool:
        """Whether every promise was kept, and put to the test at all."""
        return (
            not self.not_ended_once
            and not self.wrong_tokens
            and not self.lost_blocks
            and not self.unbalanced
            and self.detected == self.verified > 0
        )

    def add_run(
        self,
        streams: Sequence[TokenStream],
        expected: Sequence[Sequence[int]],
        events: Sequence[Mapping[str, Any]],
    ) -> None:
        """One run's streams, in the order of the tokens expected of them, and its log's EVENTS."""
        for stream, tokens in zip(streams, expected, strict=True):
            self.requests += 1
            self.outcomes[stream.reason] += 1
            self.not_ended_once += stream.num_terminals != 1
            self.wrong_tokens += num_wrong(stream, tokens)
        self.faults.update(each["kind"] for each in events if each["event"] == _FAULT)
        self.retries.update(each["code"] for each in events if each["event"] == _RETRY)
        self.restarts += sum(each["event"] == _RESTART for each in events)
        corrupted = {
            each["transfer"]
            for each in events
            if each["event"] == _FAULT and each["kind"] == "corrupt"
        }
        detected = corrupted & {each["request"] for each in events if each["event"] == _MISMATCH}
        missed = corrupted & decoded_transfers(streams, events)
        self.corrupted_transfers += len(corrupted)
        self.detected += len(detected)
        self.verified += len(detected | missed)


def num_wrong(stream: TokenStream, expected: Sequence[int]) -> int:
    """Tokens that differ from those expected; of an answer that ended well, also those missing."""
    wrong = sum(a != b for a, b in zip(stream.token_ids, expected, strict=False))
    surplus = max(0, len(stream.token_ids) - len(expected))
    missing = max(0, len(expected) - len(stream.token_ids)) if stream.ok else 0
    return wrong + surplus + missing


def decoded_transfers(
    streams: Sequence[TokenStream], events: Sequence[Mapping[str, Any]]
) -> set[str]:
    """The transfers whose blocks gave tokens: `request id#attempt`.

    An attempt that was retried did so where the client had more tokens after it than before. The
    last attempt did where the request ended well.
    """
    decoded: set[str] = set()
    sent: dict[str, int] = {}
    attempts: dict[str, int] = {}
    for event in events:
        if event["event"] == _RETRY:
            request_id, _, attempt = event["request"].rpartition("#")
            if event["tokens_sent"] > sent.get(request_id, 0):
                decoded.add(event["request"])
            sent[request_id] = event["tokens_sent"]
            attempts[request_id] = int(attempt)
    for stream in streams:
        if stream.finished is not None:
            request_id = stream.finished.request_id
            decoded.add(f"{request_id}#{attempts.get(request_id, 0) + 1}")
    return decoded
