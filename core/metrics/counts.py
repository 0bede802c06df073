"""The counters that a worker's desk keeps by name, as Prometheus has them.

Names with a part that varies, such as `refused_overloaded` and `shm_bytes_sent`, become one metric
with a label. What alerts ask for is there from the start, with zero.
"""

from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily

from core.config import TransportName

_TRANSPORTS = tuple(name for name in get_args(TransportName) if name != "auto")
_REFUSED = "refused_"
# Name, words. Counted by every worker; some never occur on one side of the hand-off.
_PLAIN = {
    "integrity_failures": "KV blocks that arrived damaged, by digest.",
    "ledger_errors": "Reports in which the block states did not sum to the pool.",
    "stale_messages": "Messages of an earlier life or an ended transfer, dropped.",
    "preemptions": "Sequences that lost their blocks to others and are computed again.",
    "blocks_evicted": "Cached KV blocks given to others.",
    "grants": "Hand-offs for which blocks were opened to a prefill worker.",
    "adoptions": "Hand-offs that arrived whole and went on decoding.",
    "local_prefills": "Prompts that the decode worker read itself.",
    "handed_over": "Requests given up to go on at a peer, since this worker turned or left.",
    "branches": "Further answers that share a prompt's blocks.",
}
# Told under vLLM's names alone.
_ELSEWHERE = ("prefix_cache_queries", "prefix_cache_hits")
# Suffix of a transport's counter: name, words, factor.
_TRANSFER = {
    "bytes_sent": ("bytes_sent", "Bytes of KV written to peers.", 1.0),
    "bytes_received": ("bytes_received", "Bytes of KV that came through this process.", 1.0),
    "busy_us": ("busy_seconds", "Time in which KV was being written.", 1e-6),
    "pairings": ("pairings", "Peers that were connected to.", 1.0),
    "fallbacks": ("fallbacks", "Offers of peers that failed before one worked.", 1.0),
    "stale_frames": ("stale_frames", "Frames of transfers that had ended, dropped.", 1.0),
    "rejected_connections": ("rejected_connections", "Connections closed for what they sent.", 1.0),
    "forbidden_tickets": ("forbidden_tickets", "Connections without a valid ticket.", 1.0),
}


def families(counts: Mapping[str, int]) -> Iterator[CounterMetricFamily]:
    """Every counter, under `tandem_`. A name that is new here is told as it is."""
    left = {name: count for name, count in counts.items() if name not in _ELSEWHERE}
    for name, words in _PLAIN.items():
        yield CounterMetricFamily(f"tandem_{name}", words, value=left.pop(name, 0))
    refusals = CounterMetricFamily(
        "tandem_refusals", "Requests turned away on arrival, by error code.", labels=("reason",)
    )
    for key in [key for key in left if key.startswith(_REFUSED)]:
        refusals.add_metric((key.removeprefix(_REFUSED),), left.pop(key))
    yield refusals
    for suffix, (name, words, factor) in _TRANSFER.items():
        family = CounterMetricFamily(f"tandem_kv_transfer_{name}", words, labels=("transport",))
        for transport in _TRANSPORTS:
            if (count := left.pop(f"{transport}_{suffix}", None)) is not None:
                family.add_metric((transport,), count * factor)
        yield family
    for key, count in left.items():
        yield CounterMetricFamily(f"tandem_{key}", "Counted since the start.", value=count)
