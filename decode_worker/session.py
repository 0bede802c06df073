"""One request in a decode worker, from its Start to its freed blocks."""

import asyncio
from dataclasses import dataclass, field, replace

from core.messages import (
    Branch,
    Commit,
    Ended,
    Endpoint,
    Failure,
    HandoffTiming,
    Start,
    StopReason,
    TokenLogprobs,
    Tokens,
    TransferId,
    WorkerRef,
)
from decode_worker.gateway_port import GatewayPort
from decode_worker.prefill_link import PrefillLink
from decode_worker.spans import SessionSpans
from engine.block_manager import BlockLease
from engine.branching import branch
from engine.engine import SequenceEvent
from engine.sequence import Sequence, SequenceKey
from kv_transfer import states
from kv_transfer.states import ReceiverAction, ReceiverEvent, ReceiverState


@dataclass(slots=True, eq=False)
class Session:
    """State that the desk alone changes. Times are of this process's monotonic clock."""

    start: Start
    port: GatewayPort
    lease: BlockLease
    # Prompt blocks [num_cached_blocks, num_prompt_blocks) have to be computed or to arrive.
    num_cached_blocks: int
    num_prompt_blocks: int
    block_hashes: tuple[bytes, ...]
    cached_tokens: int
    started_s: float
    spans: SessionSpans
    machine: states.Machine[ReceiverState, ReceiverEvent, ReceiverAction] = field(
        default_factory=states.receiver
    )
    link: PrefillLink | None = None
    commit: Commit | None = None
    asked_s: float = 0.0
    committed_s: float = 0.0
    # When the first step for a prompt that is read here began.
    prefill_began_s: float | None = None
    has_first_token: bool = False
    # The answers that go on in the engine, by choice. The lead comes first, and brings the others
    # once the prompt's KV is there.
    going: dict[int, Sequence] = field(default_factory=dict)
    deadline_timer: asyncio.TimerHandle | None = None
    accept_timer: asyncio.TimerHandle | None = None
    # How it ended: the first reason counts.
    outcome: StopReason = StopReason.UNSPECIFIED
    failure: Failure | None = None

    @property
    def transfer(self) -> TransferId:
        return self.start.transfer

    @property
    def state(self) -> ReceiverState:
        return self.machine.state

    @property
    def lead(self) -> Branch:
        """The answer that goes with the prompt to whoever reads it."""
        return self.start.branches[0]

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """The lead's tokens before it goes on: the prompt, and what the client has already."""
        return self.start.prompt_token_ids + self.lead.sent_token_ids

    @property
    def prefill(self) -> Endpoint:
        """Who reads the prompt; asked only of requests that have such a worker."""
        assert self.start.prefill is not None
        return self.start.prefill

    @property
    def prefill_worker(self) -> WorkerRef:
        return self.prefill.worker

    @property
    def awaited_blocks(self) -> tuple[int, ...]:
        """The blocks that the prompt's KV goes to, in order, behind those that are cached."""
        return self.lease.block_ids[self.num_cached_blocks : self.num_prompt_blocks]

    def concludes(self, outcome: StopReason, failure: Failure | None = None) -> None:
        """Notes how the request ends, unless that is decided."""
        if self.outcome is StopReason.UNSPECIFIED:
            self.outcome, self.failure = outcome, failure

    def stop_timers(self) -> None:
        """No timer of this session fires any more."""
        for timer in (self.deadline_timer, self.accept_timer):
            if timer is not None:
                timer.cancel()

    def begin(self) -> Sequence:
        """The lead as the engine computes it: adopted, or from its prompt on. It goes on now."""
        token_ids = list(self.known_token_ids)
        num_computed_tokens = self.cached_tokens
        if self.commit is not None:
            num_computed_tokens = len(token_ids)
            token_ids.append(self.commit.first_token_id)
        lead = Sequence(
            key=SequenceKey(self.transfer, self.lead.choice),
            token_ids=token_ids,
            num_prompt_tokens=len(self.start.prompt_token_ids),
            num_computed_tokens=num_computed_tokens,
            # Who read the prompt has told all there is to tell of it.
            num_scored_tokens=0 if self.commit is None else len(self.start.prompt_token_ids) - 1,
            lease=self.lease,
            sampling=self.start.sampling,
            cache_salt=self.start.cache_salt,
            block_hashes=self.block_hashes,
            num_published_blocks=self.num_cached_blocks,
        )
        self.going[self.lead.choice] = lead
        return lead

    def branch_out(self, block_size: int) -> tuple[Sequence, ...]:
        """The other answers, now that the lead has the prompt's KV. They go on from here."""
        lead = self.going[self.lead.choice]
        others = tuple(
            branch(lead, each.choice, each.sent_token_ids, block_size)
            for each in self.start.branches[1:]
        )
        self.going |= {each.key.choice: each for each in others}
        return others

    def stands_still(self, choice: int) -> None:
        """This answer is over, and no step touches it: its blocks are free at once."""
        sequence = self.going.pop(choice)
        sequence.drop_copy()
        sequence.lease.release()

    def sampled(self, event: SequenceEvent) -> Tokens:
        """One more token of one answer."""
        assert event.token_id is not None
        return Tokens(
            transfer=self.transfer,
            choice=event.key.choice,
            token_ids=(event.token_id,),
            stop_reason=event.stop_reason or StopReason.UNSPECIFIED,
            logprobs=(event.logprobs,) if event.logprobs is not None else (),
        )

    def scored(self, logprobs: tuple[TokenLogprobs, ...]) -> Tokens:
        """More of the prompt's log probabilities."""
        return Tokens(transfer=self.transfer, token_ids=(), prompt_logprobs=logprobs)

    def first_local_token(self, event: SequenceEvent, now_s: float) -> Tokens:
        """The first token of a prompt that was read here."""
        assert self.prefill_began_s is not None
        return replace(
            self.sampled(event),
            cached_tokens=self.cached_tokens,
            timing=HandoffTiming(
                prefill_wait_s=self.prefill_began_s - self.started_s,
                prefill_compute_s=now_s - self.prefill_began_s,
            ),
        )

    def first_tokens(self, now_s: float) -> Tokens:
        """The first token, and where its time went: the parts add up to now - started."""
        commit = self.commit
        assert commit is not None
        prefill_s = commit.prefill_wait_s + commit.prefill_compute_s
        return Tokens(
            transfer=self.transfer,
            choice=self.lead.choice,
            token_ids=(commit.first_token_id,),
            stop_reason=commit.stop_reason,
            logprobs=(commit.first_logprobs,) if commit.first_logprobs is not None else (),
            cached_tokens=commit.cached_tokens,
            timing=HandoffTiming(
                grant_s=self.asked_s - self.started_s,
                prefill_wait_s=commit.prefill_wait_s,
                prefill_compute_s=commit.prefill_compute_s,
                transfer_tail_s=max(0.0, self.committed_s - self.asked_s - prefill_s),
                adopt_s=now_s - self.committed_s,
            ),
        )

    def ended(self) -> Ended:
        """What the gateway is told at the end."""
        return Ended(transfer=self.transfer, reason=self.outcome, failure=self.failure)
