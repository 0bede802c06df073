"""What is measured of a running cluster to calibrate a timing model."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.load.client import LoadClient, Target
from bench.load.drive import closed_loop
from bench.load.request import LoadRequest, Record
from bench.load.workloads import ORDINARY_TOKENS
from core.errors import Unavailable

_PROMPTS = (16, 64, 192, 448, 960, 1600)
# Answers at once, and the tokens before each. Prompts are read one after the other, so that many
# long ones would never be answered all at once.
_STREAMS = ((1, 32), (2, 32), (4, 32), (8, 32), (1, 320), (3, 320), (1, 900), (2, 900))
# Tokens of an answer; the gap is measured in the middle of it, or where all of them overlap.
_ANSWER = 160
_STEP_ROUNDS = 2
_TIMEOUT_S = 120.0

Tell = Callable[[str], None]


@dataclass(slots=True)
class Probes:
    """Medians. `prefills`: (prompt tokens, seconds to the first token). `steps`: (sequences, tokens
    of context over all of them, seconds of a gap). `slowdowns`: what a step takes beside a busy
    neighbour over what it takes alone, less one."""

    prefills: list[tuple[int, float]] = field(default_factory=list)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)


class Prober:
    """Sends a server what tells its times apart, one thing at a time."""

    def __init__(self, target: Target, *, repeats: int, tell: Tell) -> None:
        self._target = target
        self._repeats = repeats
        self._tell = tell
        self._chance = random.Random("probes")
        self._prompts: list[int] = []

    def probe(self) -> Probes:
        """All of it: a minute or two on a small model."""
        window = self._target.window or max(_PROMPTS) + 2
        probes = Probes()
        self._send([self._request(64, 8), self._request(64, 8)], 1)
        for tokens in (each for each in _PROMPTS if each + 2 <= window):
            records = self._send([self._request(tokens, 1) for _ in range(self._repeats)], 1)
            probes.prefills.append((tokens, _median(record.ttft_s for record in records)))
            self._tell(f"a prompt of {tokens}: {1e3 * probes.prefills[-1][1]:.1f} ms")
        for streams, context in _STREAMS:
            if context + _ANSWER > window:
                continue
            gaps: list[float] = []
            for _ in range(_STEP_ROUNDS):
                asked = [self._request(context, _ANSWER) for _ in range(streams)]
                gaps += _common_gaps_s(self._send(asked, streams))
            if gaps:
                gap_s = statistics.median(gaps)
                probes.steps.append((streams, streams * (context + _ANSWER // 2), gap_s))
                self._tell(f"{streams} answers behind {context} tokens: {1e3 * gap_s:.1f} ms")
        probes.slowdowns = self._neighbours(probes, window)
        return probes

    def num_blocks(self, block_size: int) -> int:
        """Blocks that all prompts until now filled."""
        return sum(-(-tokens // block_size) for tokens in self._prompts)

    def _neighbours(self, probes: Probes, window: int) -> list[float]:
        """An answer and prompts at once, each against itself alone."""
        prompt, alone_s = max(each for each in probes.prefills if each[0] <= window // 2)
        step_s = min(seconds for streams, _, seconds in probes.steps if streams == 1)
        answer = self._request(16, min(window - 17, 3 * _ANSWER))
        prompts = [self._request(prompt, 1) for _ in range(self._repeats + 1)]
        first, others = asyncio.run(self._beside(answer, prompts))
        ends_s = others[-1].finished_s
        gaps = [
            gap
            for gap, end_s in zip(first.itls_s, first.token_times_s[1:], strict=True)
            if end_s <= ends_s
        ]
        slowdowns = []
        if gaps:
            slowdowns.append(statistics.median(gaps) / step_s - 1)
        beside = [record.ttft_s for record in others if record.finished_s <= first.finished_s]
        if beside:
            slowdowns.append(_median(beside) / alone_s - 1)
        return slowdowns

    async def _beside(
        self, answer: LoadRequest, prompts: Sequence[LoadRequest]
    ) -> tuple[Record, list[Record]]:
        client = self._client()
        encoded = client.encode(answer)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.send(encoded, 0.0, answer.max_tokens))
            records = []
            for each in prompts:
                intended_s = time.perf_counter() - client.begin_s
                records.append(await client.send(client.encode(each), intended_s, 1))
        return task.result(), records

    def _client(self) -> LoadClient:
        return LoadClient(self._target, ignore_eos=True, timeout_s=_TIMEOUT_S)

    def _request(self, tokens: int, answer: int) -> LoadRequest:
        self._prompts.append(tokens)
        prompt = tuple(self._chance.choices(range(*ORDINARY_TOKENS), k=tokens))
        return LoadRequest(prompt=prompt, max_tokens=answer)

    def _send(self, requests: Sequence[LoadRequest], concurrency: int) -> list[Record]:
        records = asyncio.run(closed_loop(self._client(), requests, concurrency=concurrency))
        for record in records:
            if record.failure is not None:
                raise Unavailable(f"{record.failure.kind}: {record.failure.detail}")
        return records


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _common_gaps_s(records: Sequence[Record]) -> list[float]:
    """The gaps while all of them were decoding; none where they never were."""
    begin_s = max(record.token_times_s[0] for record in records)
    end_s = min(record.token_times_s[-1] for record in records)
    return [
        gap
        for record in records
        for gap, at_s in zip(record.itls_s, record.token_times_s[1:], strict=True)
        if begin_s < at_s - gap and at_s <= end_s
    ]
