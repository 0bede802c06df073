"""Sequences that decode together, a token each a step, without a look at any of them.

Between two steps of which nothing is known but that all advance, only sums change. What a single
sequence does is known in advance: at which step it needs a block, and at which it ends.
"""

import collections

from bench.sim.job import Job

_Calendar = collections.defaultdict[int, list[Job]]


class DecodeBatch:
    """The members of a worker's steps. `context_tokens` is what the next step reads the KV of."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._members: dict[Job, None] = {}
        self._growing: _Calendar = collections.defaultdict(list)
        self._ending: _Calendar = collections.defaultdict(list)
        self._steps = 0
        # When steps ended, since the step `_first_kept`.
        self._ends_s: list[float] = []
        self._first_kept = 0
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def join(self, job: Job) -> None:
        """From the next step on. The job is decoding, and has its blocks."""
        if not self._members:
            self._ends_s = []
            self._first_kept = self._steps
        tokens = job.tokens.number
        job.joined_step, job.joined_tokens = self._steps, tokens
        self._members[job] = None
        self.context_tokens += tokens
        self._ending[self._steps + job.end_tokens - tokens - 1].append(job)
        self._await_growth(job)

    def growing(self) -> list[Job]:
        """Those for whose next token a block is lacking. They must have one before `advance`."""
        due = self._growing.pop(self._steps, ())
        return [job for job in due if self._is_full(job)]

    def postpone(self, growing: list[Job]) -> None:
        """There are no blocks for them: they ask again."""
        self._growing[self._steps] = growing

    def grown(self, job: Job) -> None:
        """It has its block."""
        self._await_growth(job)

    def advance(self, now_s: float) -> list[Job]:
        """A step ended. Gives those that are over; they have left."""
        self._ends_s.append(now_s)
        self._steps += 1
        self.context_tokens += len(self._members)
        due = self._ending.pop(self._steps - 1, ())
        over = [job for job in due if job in self._members and self._tokens(job) >= job.end_tokens]
        for job in over:
            self.leave(job)
        return over

    def leave(self, job: Job) -> None:
        """Brings the job up to date: its sequence, and its times."""
        del self._members[job]
        tokens = self._tokens(job)
        self.context_tokens -= tokens
        first = job.joined_step - self._first_kept
        job.times_s += self._ends_s[first:]
        job.tokens.number = tokens
        job.sequence.num_computed_tokens = tokens - 1
        job.joined_step = -1

    def dissolve(self) -> None:
        """All leave."""
        for job in list(self._members):
            self.leave(job)
        self._growing.clear()
        self._ending.clear()

    def _tokens(self, job: Job) -> int:
        return job.joined_tokens + self._steps - job.joined_step

    def _room(self, job: Job) -> int:
        return len(job.sequence.lease.block_ids) * self._block_size

    def _is_full(self, job: Job) -> bool:
        return job in self._members and self._tokens(job) > self._room(job)

    def _await_growth(self, job: Job) -> None:
        room = self._room(job)
        # The last token of an answer is sampled, and no step reads it.
        if room < job.end_tokens - 1:
            self._growing[job.joined_step + room + 1 - job.joined_tokens].append(job)
