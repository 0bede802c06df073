"""Where one request goes: the pure choice of who reads its prompt and who decodes, together.

Every way is judged by what it is expected to cost: the time to the first token, and the lateness of
tokens that it causes, its own and others' (`scheduler.cost`). What prefix caches hold, what is
placed already, what the link takes and what decoding beside it loses are all in there; no threshold
decides between a pair of workers and a decode worker alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from core.messages import Candidate, Compatibility, Explanation
from scheduler.cost import (
    backlog_s,
    read_s,
    stall_lateness_s,
    transfer_s,
)
from scheduler.view import ClusterView, Waiting, WorkerView, charge_decode, charge_prefill

# Late binding: a worker is given the next prompt only when it has read what it has but for so much.
# Long enough for a placement's way to it, short enough that the order of the queue still means
# something.
WINDOW_S = 0.03
# And never more than this, however soon it was expected to have read it.
BACKLOG_STEPS = 2
# Prefill workers whose partners are looked at, the best first: what a decode worker has cached
# saves a transfer, and so can tip the balance between near equals.
_PREFILLS = 2
# One part in so many of a decode worker stays free of tenants that hold more than their share.
GUEST_ROOM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to serve a request. Without a prefill worker the decode worker reads the prompt."""

    prefill: WorkerView | None
    decode: WorkerView
    # Until the reader is free, and what the reading then takes.
    backlog_s: float
    read_s: float
    transfer_s: float
    lateness_s: float
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.backlog_s + self.read_s + self.transfer_s

    @property
    def rank(self) -> tuple[float, int, int, str, str]:
        """The least is the best. Equal costs go to whom less is asked of, then by name."""
        prefill = self.prefill.name if self.prefill is not None else ""
        decode = self.decode
        score = self.ttft_s + self.lateness_s
        return score, decode.num_seqs, -decode.num_free_blocks, prefill, decode.name

    def told(self) -> Candidate:
        """The option as an explanation has it."""
        return Candidate(
            prefill=self.prefill.name if self.prefill is not None else "",
            decode=self.decode.name,
            ttft_s=self.ttft_s,
            lateness_s=self.lateness_s,
            transfer_s=self.transfer_s,
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best option of each kind, and which of them it is to be.

    `waits`: its reader has enough to read for now, and the request is worth keeping for it.
    """

    option: Option
    other: Option | None
    waits: bool
    num_candidates: int

    def explanation(self, reason: str = "") -> Explanation:
        """Why it is this one; bounded in size."""
        options = (self.option, self.other) if self.other is not None else (self.option,)
        return Explanation(
            reason=reason or self._reason(),
            num_candidates=self.num_candidates,
            candidates=tuple(each.told() for each in options),
        )

    def _reason(self) -> str:
        local = self.option.prefill is None
        if self.other is None:
            return (
                "only decode workers can read it" if local else "only prefill workers can read it"
            )
        return "least lateness: read by the decode worker" if local else "least lateness: a pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """About what reading a prompt on a decode worker costs: at all, and for each of its tokens."""

    base_s: float
    token_s: float


class Slate:
    """The workers as one call of the policy leaves them: each placement is charged to them."""

    def __init__(self, view: ClusterView, now_s: float) -> None:
        self.view = view
        self.now_s = now_s
        # Placements that may be made yet.
        self.num_left = math.inf if view.max_placements is None else view.max_placements
        self.readers = view.readers
        self.pairing = view.pairing_prefills
        self.prefills = {each.name: each for each in self.pairing}
        self.decodes = {each.name: each for each in view.decodes}
        measured = view.measured
        self.prefill_speed = measured.prefill_speed
        self.reader_speed = measured.reader_speed
        # Who takes another prompt now, of anybody or of a guest.
        by_s = now_s + WINDOW_S
        self._open_prefills = {
            name
            for name, each in self.prefills.items()
            if (each.busy_until_s is None or each.busy_until_s < by_s)
            and each.num_seqs < each.max_seqs
            and self._is_open(each)
        }
        self._open_readers = {
            each.name
            for each in self.readers
            if (each.busy_until_s is None or each.busy_until_s < by_s)
            and each.num_seqs < each.max_seqs
            and not each.num_preempted
            and self._is_open(each)
        }
        self._guest_prefills, self._guest_readers = self._open_prefills, self._open_readers
        if view.greedy:
            self._guest_prefills = {
                name for name, each in self.prefills.items() if self._is_open_to_guests(each)
            }
            self._guest_readers = {
                each.name
                for each in self.readers
                if not each.num_preempted and self._is_open_to_guests(each)
            }

    def is_open_to(self, waiting: Waiting) -> bool:
        """Whether anybody takes its prompt now: else it cannot be placed, whatever it is."""
        if self.is_guest(waiting):
            return bool(self._guest_prefills or self._guest_readers)
        return bool(self._open_prefills or self._open_readers)

    def is_guest(self, waiting: Waiting) -> bool:
        """Whether others hold more than their share, and its tenant does not.

        Workers read its prompt before theirs, so that only other guests' are before it.
        """
        return bool(self.view.greedy) and waiting.tenant not in self.view.greedy

    def _is_open_to_guests(self, worker: WorkerView) -> bool:
        return (
            worker.num_seqs < worker.max_seqs
            and worker.guest_backlog_tokens < BACKLOG_STEPS * worker.max_step_tokens
            and worker.guest_busy_until_s - self.now_s < WINDOW_S
        )

    def _is_open(self, worker: WorkerView) -> bool:
        if worker.backlog_tokens >= BACKLOG_STEPS * worker.max_step_tokens:
            return False
        if worker.busy_until_s is not None:
            return worker.busy_until_s - self.now_s < WINDOW_S
        best = self.reader_speed if worker.local_prefill else self.prefill_speed
        return backlog_s(worker, best, self.now_s) < WINDOW_S

    def _all_backlog_s(self, option: Option) -> float:
        """Until the option's reader has read everybody's prompts."""
        if option.prefill is None:
            return backlog_s(self.decodes[option.decode.name], self.reader_speed, self.now_s)
        return backlog_s(self.prefills[option.prefill.name], self.prefill_speed, self.now_s)

    def glance(self, waiting: Waiting) -> "Glance | None":
        """What reading costs at the least busy decode worker that takes prompts now."""
        best: Glance | None = None
        answer = self.view.expected_answer_tokens(waiting)
        for name in self._open_readers:
            worker = self.decodes[name]
            base_s = backlog_s(worker, self.reader_speed, self.now_s)
            base_s += worker.lateness_s
            if best is not None and base_s >= best.base_s:
                continue
            token_s = 1.0 / (worker.prefill_tokens_per_s or self.reader_speed)
            if worker.cost is not None:
                token_s += worker.num_seqs * worker.cost.token_s / answer
            best = Glance(base_s=base_s, token_s=token_s)
        return best

    def charge(self, option: Option, waiting: Waiting) -> None:
        """Takes what a request placed so needs from its workers."""
        self.num_left -= 1
        rules = self.view.rules
        decode = self.decodes[option.decode.name]
        guest_busy_until_s: float | None = None
        busy_until_s = self.now_s + option.backlog_s + option.read_s
        if self.is_guest(waiting):
            guest_busy_until_s = busy_until_s
            busy_until_s = self.now_s + self._all_backlog_s(option) + option.read_s
        if option.prefill is None:
            decode = charge_decode(
                decode,
                rules,
                waiting,
                unread_tokens=waiting.prompt_tokens,
                busy_until_s=busy_until_s,
                guest_busy_until_s=guest_busy_until_s,
            )
        else:
            prefill = charge_prefill(
                self.prefills[option.prefill.name],
                waiting.prompt_tokens,
                busy_until_s=busy_until_s,
                guest_busy_until_s=guest_busy_until_s,
            )
            self.prefills[prefill.name] = prefill
            if prefill.num_seqs >= prefill.max_seqs or not self._is_open(prefill):
                self._open_prefills.discard(prefill.name)
            if not self._is_open_to_guests(prefill):
                self._guest_prefills.discard(prefill.name)
            decode = charge_decode(decode, rules, waiting)
        self.decodes[decode.name] = decode
        if decode.num_seqs >= decode.max_seqs or not self._is_open(decode):
            self._open_readers.discard(decode.name)
        if not self._is_open_to_guests(decode):
            self._guest_readers.discard(decode.name)

    def choose(self, waiting: Waiting, excluded: frozenset[str] = frozenset()) -> Choice | None:
        """Where the request goes, or for whom it waits; None where no decode worker has room."""
        cached = self.view.prefixes.match(waiting.block_hashes) if waiting.block_hashes else {}
        roomy = self._roomy(waiting, excluded)
        if not roomy:
            return None
        pair, num_pairs = self._best_pair(waiting, roomy, cached, excluded)
        reader, num_readers = self._best_reader(waiting, roomy, cached)
        count = num_pairs + num_readers
        if reader is not None and (pair is None or self._is_better(reader, pair)):
            return Choice(option=reader, other=pair, waits=False, num_candidates=count)
        if pair is None or pair.prefill is None:
            return None
        is_open = self._guest_prefills if self.is_guest(waiting) else self._open_prefills
        waits = pair.prefill.name not in is_open
        return Choice(option=pair, other=reader, waits=waits, num_candidates=count)

    def choose_reader(self, waiting: Waiting) -> Choice | None:
        """The decode worker that would read it now; None where none would."""
        cached = self.view.prefixes.match(waiting.block_hashes) if waiting.block_hashes else {}
        reader, count = self._best_reader(waiting, self._roomy(waiting, frozenset()), cached)
        if reader is None:
            return None
        return Choice(option=reader, other=None, waits=False, num_candidates=count)

    def _is_better(self, reader: Option, pair: Option) -> bool:
        if not self.reader_speed or not self.prefill_speed:
            return False  # until both were measured, prompts go where they belong
        return reader.ttft_s + reader.lateness_s < pair.ttft_s + pair.lateness_s

    def _roomy(self, waiting: Waiting, excluded: frozenset[str]) -> list[tuple[float, WorkerView]]:
        """Decode workers with room for the answers, and the lateness of decoding there.

        Sequences that a worker preempted go first, so it counts as full.
        """
        guest_room = GUEST_ROOM if waiting.tenant in self.view.greedy else 0
        num_choices = waiting.num_choices
        shape, blocks = (0, 0), 0
        roomy: list[tuple[float, WorkerView]] = []
        for worker in self.decodes.values():
            free_seqs = worker.max_seqs - worker.num_seqs
            if free_seqs <= 0 or worker.num_preempted or (excluded and worker.name in excluded):
                continue
            if shape != (worker.num_blocks, worker.block_size):
                shape = (worker.num_blocks, worker.block_size)
                blocks = self.view.rules.reserved_blocks(worker, waiting)
            free_blocks = worker.num_free_blocks
            if guest_room:
                free_seqs -= worker.max_seqs // guest_room
                free_blocks -= worker.num_blocks // guest_room
            if blocks <= free_blocks and (num_choices <= free_seqs or worker.max_seqs <= free_seqs):
                lateness_s = worker.lateness_s
                if num_choices > 1:
                    lateness_s = worker.decode_lateness_s(num_choices)
                roomy.append((lateness_s, worker))
        return roomy

    def _best_pair(
        self,
        waiting: Waiting,
        roomy: list[tuple[float, WorkerView]],
        cached: Mapping[str, int],
        excluded: frozenset[str],
    ) -> tuple[Option | None, int]:
        """The best pair with room, whose prefill worker may be busy, and how many were compared."""
        prompt, now_s, best = waiting.prompt_tokens, self.now_s, self.prefill_speed
        is_guest = self.is_guest(waiting)
        readings: list[tuple[float, str, float, float, int, WorkerView]] = []
        # When the first of them would have read it and sent all of it.
        soonest_s = math.inf
        kinds: list[Compatibility] = []
        for _, decode in roomy:
            if decode.compatibility not in kinds:
                kinds.append(decode.compatibility)
        for name, worker in self.prefills.items():
            busy_s = worker.guest_busy_until_s if is_guest else worker.busy_until_s
            if busy_s is None:
                waits_s = backlog_s(worker, best, now_s)
            else:
                waits_s = busy_s - now_s if busy_s > now_s else 0.0
            # Most are ruled out by this alone: nothing but cached blocks saves a token's time.
            if name not in cached and waits_s + prompt * worker.read_token_s > soonest_s:
                continue
            size = worker.block_size
            if (
                worker.num_seqs >= worker.max_seqs
                or prompt > size * worker.num_free_blocks
                or (excluded and name in excluded)
                or worker.compatibility not in kinds
            ):
                continue
            found = min(cached[name] * size, prompt - 1) if name in cached else 0
            reads_s = read_s(worker, prompt, found, best)
            ready_s = waits_s + reads_s
            if worker.link_bytes_per_s:
                ready_s += transfer_s(worker, -(-prompt // size), reads_s)
            if ready_s < soonest_s:
                soonest_s = ready_s
            readings.append((ready_s, name, waits_s, reads_s, found, worker))
        best_option: Option | None = None
        for _, _, waits_s, reads_s, found, prefill in sorted(readings)[:_PREFILLS]:
            moves_s, lateness_s, decode = _best_partner(prefill, prompt, reads_s, roomy, cached)
            option = Option(
                prefill=prefill,
                decode=decode,
                backlog_s=waits_s,
                read_s=reads_s,
                transfer_s=moves_s,
                lateness_s=lateness_s,
                cached_tokens=found,
            )
            if best_option is None or option.rank < best_option.rank:
                best_option = option
            if not moves_s:  # without a link to tell them apart, no later one can be better
                break
        return best_option, len(self.prefills) * len(roomy) if best_option is not None else 0

    def _best_reader(
        self, waiting: Waiting, roomy: list[tuple[float, WorkerView]], cached: Mapping[str, int]
    ) -> tuple[Option | None, int]:
        """The best decode worker that takes a prompt now, and how many do."""
        is_guest = self.is_guest(waiting)
        open_readers = self._guest_readers if is_guest else self._open_readers
        if not open_readers:
            return None, 0
        prompt, best, now_s = waiting.prompt_tokens, self.reader_speed, self.now_s
        answer = self.view.expected_answer_tokens(waiting)
        # (cost, sequences, blocks taken, name) decides; the rest is what it was made of.
        chosen: tuple[float, int, int, str, float, float, float, int, WorkerView] | None = None
        count = 0
        least = math.inf
        for decoding_s, worker in roomy:
            name = worker.name
            if name not in open_readers:
                continue
            count += 1
            busy_s = worker.guest_busy_until_s if is_guest else worker.busy_until_s
            if busy_s is None:
                waits_s = backlog_s(worker, best, now_s)
            else:
                waits_s = busy_s - now_s if busy_s > now_s else 0.0
            # What the prefix cache has makes reading quicker, and nothing else does.
            if name in cached:
                found = min(cached[name] * worker.block_size, prompt - 1)
            elif waits_s + decoding_s + prompt * worker.read_token_s > least:
                continue
            else:
                found = 0
            reads_s = read_s(worker, prompt, found, best)
            if is_guest:
                # Its steps are full of others' answers, which nobody's backlog tells a guest of.
                reads_s *= max(1.0, worker.pace)
            lateness_s = decoding_s + stall_lateness_s(worker, prompt, found, answer)
            score = waits_s + reads_s + lateness_s
            if score > least:
                continue
            least = score
            key = (score, worker.num_seqs, -worker.num_free_blocks, name)
            if chosen is None or key < chosen[:4]:
                chosen = (*key, waits_s, reads_s, lateness_s, found, worker)
        if chosen is None:
            return None, 0
        *_, waits_s, reads_s, lateness_s, found, worker = chosen
        option = Option(
            prefill=None,
            decode=worker,
            backlog_s=waits_s,
            read_s=reads_s,
            transfer_s=0.0,
            lateness_s=lateness_s,
            cached_tokens=found,
        )
        return option, count


def _best_partner(
    prefill: WorkerView,
    prompt: int,
    reads_s: float,
    roomy: list[tuple[float, WorkerView]],
    cached: Mapping[str, int],
) -> tuple[float, float, WorkerView]:
    """(exposed transfer, lateness, worker): who decodes best what this prefill worker reads.

    One of `roomy` is compatible with it.
    """
    same = prefill.compatibility
    blocks = -(-prompt // same.block_size)
    all_s = transfer_s(prefill, blocks, reads_s)
    best: tuple[float, float, WorkerView] | None = None
    best_score = 0.0
    for lateness_s, worker in roomy:
        if worker.compatibility is not same and worker.compatibility != same:
            continue
        moves_s = all_s
        if all_s and cached and (held := cached.get(worker.name, 0)):
            moves_s = transfer_s(prefill, max(1, blocks - held), reads_s)
        score = moves_s + lateness_s
        if best is not None:
            if score > best_score:
                continue
            if score == best_score and _preference(worker) >= _preference(best[2]):
                continue
        best, best_score = (moves_s, lateness_s, worker), score
    assert best is not None
    return best


def _preference(decode: WorkerView) -> tuple[int, int, str]:
    return decode.num_seqs, -decode.num_free_blocks, decode.name
