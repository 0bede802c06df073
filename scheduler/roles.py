"""Carries out what the controller wishes: measures the demand, tells workers to turn, counts.

`scheduler.elastic` decides and `scheduler.demand` says what is asked for; this owns what both need
to remember. Also where nobody turns it says how many workers of each role the demand could use.
"""

import collections
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import structlog

from core.config import SchedulerConfig
from core.errors import InvalidRequest
from core.messages import StepCost, Turn, WorkerRole
from scheduler.cluster import Cluster, Member
from scheduler.demand import Capacity, Demand, DemandMeter, Loads, loads
from scheduler.elastic import ElasticSettings, Memory, PoolWorker, Split, Wishes, steer, wanted
from scheduler.split_file import SplitFile
from scheduler.view import Waiting

# How often the controller looks.
_LOOK_S = 1.0
# A worker that was told to turn says hello again well within this.
_OBEYS_S = 15.0
STEP_TARGET_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesState:
    """What a person is shown."""

    elastic: str
    override: Split | None
    now: Split
    wishes: Wishes
    loads: Loads | None
    turning: tuple[str, ...]


class Roles:
    """Owns the controller's memory; the cluster's members are what it works on."""

    def __init__(
        self,
        config: SchedulerConfig,
        cluster: Cluster,
        *,
        step_target_s: float = STEP_TARGET_S,
        kept: SplitFile | None = None,
    ) -> None:
        """`step_target_s` is within which time an answer's next token should come; 0: no target."""
        self._config = config
        self._cluster = cluster
        self._step_target_s = step_target_s
        self._kept = kept or SplitFile(None)
        self._settings = ElasticSettings(
            min_prefill=config.min_prefill_workers,
            max_prefill=config.max_prefill_workers,
            min_decode=config.min_decode_workers,
            max_decode=config.max_decode_workers,
            patience_s=config.elastic_patience_s,
            cooldown_s=config.elastic_cooldown_s,
        )
        self.recall()
        self._memory = Memory()
        self._meter = DemandMeter()
        self._looked_s = float("-inf")
        self._log = structlog.get_logger()
        self.loads: Loads | None = None
        self.wishes = Wishes(wanted=wanted(None, self._settings))
        # Workers that have turned, by the role that they turned to.
        self.num_turns = collections.Counter({WorkerRole.PREFILL: 0, WorkerRole.DECODE: 0})

    # --- what happens --------------------------------------------------------------------------

    def arrived(self, waiting: Waiting, answer_tokens: float, *, now_s: float) -> None:
        """A request came, for the first time."""
        self._meter.arrived(
            prompt_tokens=waiting.prompt_tokens,
            num_answers=waiting.num_choices,
            answer_tokens=answer_tokens,
            cost=waiting.cost,
            now_s=now_s,
        )

    def placed(self, waiting: Waiting, cached_tokens: int, *, now_s: float) -> None:
        """A request was given to workers that have so much of its prompt."""
        self._meter.placed(
            prompt_tokens=waiting.prompt_tokens, cached_tokens=cached_tokens, now_s=now_s
        )

    def joined(self, member: Member, earlier: Member | None) -> None:
        """A worker said hello; `earlier` is what was known of the same life of it."""
        role = member.hello.role
        if earlier is not None and earlier.hello.role is not role:
            self.num_turns[role] += 1
            self._log.info("worker_turned", worker=member.key, role=role.name.lower())

    # --- a person ------------------------------------------------------------------------------

    def recall(self) -> None:
        """Takes up the split that a person chose in an earlier scheduler's time."""
        if self._config.elastic == "auto":
            self._settings = replace(self._settings, override=self._kept.load())

    def override(self, split: Split | None) -> None:
        """Sets a person's split, or gives the choice back to the demand.

        Raises InvalidRequest that names the field and its limit.
        """
        if self._config.elastic == "off":
            raise InvalidRequest(
                "workers do not turn here: start the cluster with scheduler.elastic = 'auto'",
                field="scheduler.elastic",
            )
        if split is not None:
            self._check(split)
        self._settings = replace(self._settings, override=split)
        self._kept.store(split)
        self._looked_s = float("-inf")
        self._log.info("split_chosen", split=asdict(split) if split is not None else "auto")

    def _check(self, split: Split) -> None:
        bounds = self._settings
        for field, number, least, most in (
            ("prefill", split.prefill, bounds.min_prefill, bounds.max_prefill),
            ("decode", split.decode, bounds.min_decode, bounds.max_decode),
        ):
            if not least <= number <= most:
                raise InvalidRequest(
                    f"{field}: {number} is not within {least} to {most} "
                    f"(scheduler.min_{field}_workers, scheduler.max_{field}_workers)",
                    field=field,
                )
        there = len(self._workers())
        if split.prefill + split.decode != there:
            raise InvalidRequest(
                f"prefill and decode: {split.prefill} and {split.decode} are not {there}, which is "
                "how many workers are here",
                field="prefill",
            )

    def state(self) -> RolesState:
        """What there is and what is wished for."""
        workers = self._workers()
        num_prefill = sum(1 for each in workers if each.role is WorkerRole.PREFILL)
        return RolesState(
            elastic=self._config.elastic,
            override=self._settings.override,
            now=Split(prefill=num_prefill, decode=len(workers) - num_prefill),
            wishes=self.wishes,
            loads=self.loads,
            turning=tuple(each.name for each in workers if each.turning),
        )

    def expected(self, configured: Split) -> Split:
        """How many workers of each role there should be, of so many as are configured.

        Where workers turn, those that are here are as they should be. One that is missing begins
        as it was started: in the role of which there are fewer than were configured.
        """
        if self._config.elastic == "off":
            return configured
        roles = [each.hello.role for each in self._cluster.members.values()]
        prefill, decode = (roles.count(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
        missing = max(0, configured.prefill + configured.decode - len(roles))
        missing_prefill = min(missing, max(0, configured.prefill - prefill))
        return Split(prefill=prefill + missing_prefill, decode=decode + missing - missing_prefill)

    # --- the controller ------------------------------------------------------------------------

    def look(self, now_s: float, *, queued_cost: float) -> None:
        """Has the controller decide, once in a while, and tells the worker that is to turn."""
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        self._give_up_waiting(now_s)
        capacity = self._capacity()
        if capacity is not None:
            demand = self._meter.demand(now_s, queued_cost=queued_cost)
            self.loads = loads(self._with_running(demand), capacity)
        workers = self._workers() if self._config.elastic == "auto" else []
        settings = replace(self._settings, decoders_read=self._decoders_read())
        self.wishes, self._memory = steer(workers, self.loads, settings, self._memory, now_s=now_s)
        if (turn := self.wishes.turn) is not None:
            member = self._cluster.members[turn.worker]
            member.told, member.told_s = turn.role, now_s
            self._log.info(
                "worker_is_to_turn", worker=turn.worker, role=turn.role.name.lower(), why=turn.why
            )
            member.tell(Turn(role=turn.role))

    def _with_running(self, demand: Demand) -> Demand:
        decodes = [
            each.load
            for each in self._cluster.members.values()
            if each.hello.role is WorkerRole.DECODE and each.load is not None
        ]
        return replace(
            demand,
            num_decoding=sum(each.num_running for each in decodes),
            num_decode_workers=len(decodes),
        )

    def _give_up_waiting(self, now_s: float) -> None:
        """A worker that was told to turn and says nothing serves what it served."""
        for member in self._cluster.members.values():
            if member.told is not None and now_s - member.told_s >= _OBEYS_S:
                self._log.warning("worker_did_not_turn", worker=member.key)
                member.told = None

    def _workers(self) -> list[PoolWorker]:
        """Those that are here to stay."""
        found = []
        for member in self._cluster.members.values():
            load = member.load
            if load is None or load.draining:
                continue
            view = self._cluster.view_of(member)
            found.append(
                PoolWorker(
                    name=member.key,
                    role=member.told or member.hello.role,
                    turning=member.told is not None or load.turning,
                    fixed=not member.hello.elastic,
                    num_placed=member.num_seqs,
                    num_blocks=view.num_blocks,
                    num_free_blocks=max(0, view.num_free_blocks),
                )
            )
        return found

    def _decoders_read(self) -> bool:
        """Whether decode workers are given prompts to read."""
        return self._config.local_prefill != "never" and any(
            each.hello.local_prefill for each in self._cluster.members.values()
        )

    def _capacity(self) -> Capacity | None:
        """What a worker can do, by what those of each role have measured; None: nothing yet."""
        members = [each for each in self._cluster.members.values() if each.load is not None]
        reading = _costs(members, WorkerRole.PREFILL) or _costs(members, WorkerRole.DECODE)
        decoding = _costs(members, WorkerRole.DECODE) or reading
        if not reading:
            return None
        hello = next(
            (each.hello for each in members if each.hello.role is WorkerRole.DECODE),
            members[0].hello,
        )
        return Capacity(
            cost=StepCost(
                base_s=_mean([each.base_s for each in decoding]),
                decode_s=_mean([each.decode_s for each in decoding]),
                token_s=_mean([each.token_s for each in reading]),
                pair_s=_mean([each.pair_s for each in reading]),
            ),
            max_step_tokens=hello.max_step_tokens,
            max_seqs=hello.max_seqs,
            kv_tokens=hello.num_blocks * hello.compatibility.block_size,
            step_target_s=self._step_target_s,
        )


def _costs(members: Sequence[Member], role: WorkerRole) -> list[StepCost]:
    return [
        each.load.cost
        for each in members
        if each.hello.role is role and each.load is not None and each.load.cost is not None
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
