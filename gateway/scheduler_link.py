"""The gateway's stream to the scheduler: asks for placements, says when they are over.

The scheduler's state is soft. On each new stream everything that still counts is said again: the
requests that wait, and the placements that still hold blocks.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from core import rpc
from core.errors import DeadlineExceeded, Overloaded, TandemError, from_failure
from core.leader_finder import LeaderFinder
from core.messages import (
    Enqueue,
    GatewayHello,
    Holding,
    KeepTrace,
    Placement,
    PoolSizes,
    Prefilled,
    Rejection,
    Settle,
    Standby,
    Ticket,
    TransferId,
    Welcome,
    Withdraw,
    WorkerRef,
)
from core.store.lease import Lease
from core.stream import StreamLink
from protos.tandem.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

_AWAY = "the scheduler cannot be reached"
_NOT_SAID = "the scheduler does not know the model"


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits for its placement."""

    enqueue: Enqueue
    deadline_s: float  # on this process's monotonic clock
    answer: asyncio.Future[Placement]

    def again(self) -> Enqueue:
        """The request with what is left of its deadline now."""
        return replace(self.enqueue, remaining_s=max(0.0, self.deadline_s - time.monotonic()))


class SchedulerLink:
    """Owns the requests that wait and the placements that hold something.

    `on_pools` is called whenever `pools` has changed.
    """

    def __init__(
        self,
        finder: LeaderFinder,
        me: WorkerRef,
        *,
        on_pools: Callable[[], None] = lambda: None,
        admin_address: str = "",
        dial: rpc.Dial = rpc.channel,
    ) -> None:
        self._finder = finder
        self._me = me
        self._admin_address = admin_address
        self._on_pools = on_pools
        self._asked: dict[TransferId, _Asked] = {}
        self._holdings: dict[TransferId, Holding] = {}
        # By model; none while the scheduler is away.
        self.pools: dict[str, PoolSizes] = {}
        self._link = StreamLink(
            finder.next_address,
            _open,
            scheduler_pb2.ScheduleRequest,
            hello=self._hello,
            on_message=self._received,
            on_down=self._lost,
            longest_pause_s=finder.pause_s,
            dial=dial,
        )

    async def run(self) -> None:
        """Keeps the stream up until cancelled."""
        await self._link.keep_up()

    @property
    def reachable(self) -> bool:
        """Whether the scheduler has spoken on the stream that is up."""
        return bool(self.pools)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a placement."""
        return len(self._asked)

    @property
    def num_placed(self) -> int:
        """Placements that hold something."""
        return len(self._holdings)

    def not_ready(self, model: str) -> str | None:
        """Why no request for the model could be placed now; None where one could."""
        if not self.pools:
            return _AWAY
        pool = self.pools.get(model)
        return _NOT_SAID if pool is None else pool.not_ready or None

    async def place(self, enqueue: Enqueue) -> Placement:
        """Waits in the scheduler's queue for a placement.

        Raises Overloaded, DeadlineExceeded or what else the scheduler rejects it with. A scheduler
        that is away for a while only makes the wait longer.
        """
        answer: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        asked = _Asked(enqueue, time.monotonic() + enqueue.remaining_s, answer)
        self._asked[enqueue.transfer] = asked
        self._link.send(enqueue)
        taken = False
        try:
            async with asyncio.timeout(enqueue.remaining_s):
                placement = await answer
            taken = True
            return placement
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed in the queue") from None
        finally:
            del self._asked[enqueue.transfer]
            if not taken:  # also where the placement came and we were cancelled in the same turn
                self._holdings.pop(enqueue.transfer, None)
                self._link.send(Withdraw(transfer=enqueue.transfer))

    def give_up(self, error: TandemError) -> None:
        """Ends every wait for a placement with this error."""
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)

    def prefilled(self, transfer: TransferId) -> None:
        """The first token came: the prefill worker is free of this request."""
        if (holding := self._holdings.get(transfer)) is not None:
            self._holdings[transfer] = replace(holding, prefill=None)
            self._link.send(Prefilled(transfer=transfer))

    def settle(self, transfer: TransferId) -> None:
        """The placement holds nothing any more. Idempotent."""
        if self._holdings.pop(transfer, None) is not None:
            self._link.send(Settle(transfer=transfer))

    def keep_trace(self, keep: KeepTrace) -> None:
        """The scheduler is to export what it has recorded of this request."""
        self._link.send(keep)

    def leader_heard(self, lease: Lease) -> None:
        """Redis says who leads: where that is another one than we are with, we turn to it."""
        if self._finder.heard(lease):
            self._link.drop()

    def refused_as_stale(self, ticket: Ticket | None) -> None:
        """A worker has seen a later leader than the one that signed this."""
        if ticket is not None and self._finder.doubts(ticket.leader_token):
            self._link.drop()

    def _hello(self) -> list[Any]:
        hello = GatewayHello(
            gateway=self._me,
            holdings=tuple(self._holdings.values()),
            admin_address=self._admin_address,
            leader_token=self._finder.leader_token,
        )
        return [hello, *(asked.again() for asked in self._asked.values())]

    def _lost(self) -> None:
        self.pools = {}
        self._on_pools()

    def _received(self, message: Any) -> None:
        match message:
            case Welcome():
                if not self._finder.welcomed(message):
                    self._link.drop()
            case Standby():
                self._finder.refused(message)
            case _ if not self._finder.obeyed:
                pass  # what came behind the word of a leader that is none any more
            case PoolSizes():
                self.pools[message.model] = message
                self._on_pools()
            case Placement():
                self._placed(message)
            case Rejection():
                asked = self._asked.get(message.transfer)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_exception(_error_of(message))

    def _placed(self, placement: Placement) -> None:
        asked = self._asked.get(placement.transfer)
        if asked is None or asked.answer.done():
            # Nobody waits any more; our withdrawal settles it, unless it was placed twice.
            if placement.transfer not in self._holdings:
                self._link.send(Settle(transfer=placement.transfer))
            return
        self._holdings[placement.transfer] = Holding(
            transfer=placement.transfer,
            prefill=(placement.prefill or placement.decode).worker,
            decode=placement.decode.worker,
            prompt_tokens=asked.enqueue.prompt_tokens,
            max_new_tokens=asked.enqueue.max_new_tokens,
            num_choices=asked.enqueue.num_choices,
            tenant=asked.enqueue.tenant,
            model=asked.enqueue.model,
        )
        asked.answer.set_result(placement)


def _error_of(rejection: Rejection) -> TandemError:
    error = from_failure(rejection.failure)
    if isinstance(error, Overloaded):
        error.retry_after_s = rejection.retry_after_s
    return error


def _open(channel: grpc.aio.Channel) -> object:
    return scheduler_pb2_grpc.SchedulerServiceStub(channel).Schedule
