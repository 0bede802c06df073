"""A worker's side of its registration with the scheduler: says hello, then how it is loaded.

All of it is soft state. After a lost stream or a restarted scheduler everything is said again.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import grpc
import structlog

from core import rpc
from core.leader_finder import LeaderFinder
from core.messages import (
    CacheNews,
    Failure,
    HandOver,
    Standby,
    Turn,
    TurnedAway,
    Welcome,
    WorkerHello,
    WorkerLoad,
    WorkerRole,
)
from core.store.lease import Lease
from core.stream import StreamLink
from protos.tandem.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

_AWAY = "the scheduler cannot be reached"


class Registration:
    """Keeps one worker known to the scheduler that leads."""

    def __init__(
        self,
        finder: LeaderFinder,
        hello: WorkerHello,
        load: Callable[[], WorkerLoad],
        *,
        interval_s: float,
        cache_news: Callable[[bool], CacheNews] = lambda whole: CacheNews(whole=whole),
        on_command: Callable[[Turn | HandOver], None] = lambda command: None,
        dial: rpc.Dial = rpc.channel,
    ) -> None:
        """`cache_news(True)` gives all that the prefix cache holds, `cache_news(False)` changes."""
        self._finder = finder
        self._hello = hello
        self._load = load
        self._cache_news = cache_news
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self._on_command = on_command
        self._link = StreamLink(
            finder.next_address,
            _open,
            scheduler_pb2.RegisterRequest,
            hello=self._all,
            on_message=self._received,
            on_down=self._lost,
            longest_pause_s=finder.pause_s,
            dial=dial,
        )
        # Set while the scheduler has answered on the stream that is up, and takes the worker.
        self.known = asyncio.Event()
        self._why_not = _AWAY
        self._log = structlog.get_logger()

    def not_known(self) -> str | None:
        """Why the scheduler gives this worker nothing; None where it is known there."""
        return None if self.known.is_set() else self._why_not

    def leader_heard(self, lease: Lease) -> None:
        """Redis says who leads: where that is another one than we are with, we turn to it."""
        if self._finder.heard(lease):
            self._link.drop()

    def _all(self) -> list[object]:
        hello = replace(self._hello, leader_token=self._finder.leader_token)
        return [hello, self._load(), self._cache_news(True)]

    def _received(self, message: object) -> None:
        match message:
            case Welcome():
                if self._finder.welcomed(message):
                    self.known.set()
                else:
                    self._link.drop()
            case Standby():
                self._finder.refused(message)
            case TurnedAway(failure=failure):
                self._turned_away(failure)
            case Turn() | HandOver() if self._finder.obeyed:
                self._on_command(message)

    def _turned_away(self, failure: Failure) -> None:
        """Another scheduler may come, with other settings: then all is said again."""
        self.known.clear()
        self._why_not = failure.message
        self._log.error("not_registered", why=failure.message)

    def _lost(self) -> None:
        self.known.clear()
        self._why_not = _AWAY

    def become(self, role: WorkerRole, *, local_prefill: bool) -> None:
        """Says hello in another role. `known` is set again once the scheduler has heard."""
        self._hello = replace(self._hello, role=role, local_prefill=local_prefill)
        self.known.clear()
        for message in self._all():
            self._link.send(message)  # where the stream is down, the next one says it

    def report_now(self) -> None:
        """Sends the load at once instead of at the next interval."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.keep_up())
            tasks.create_task(self._report())

    async def _report(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            self._changed.clear()
            if self._finder.outdated:
                self._link.drop()
            self._link.send(self._load())
            news = self._cache_news(False)
            if news.published or news.evicted:
                self._link.send(news)


def _open(channel: grpc.aio.Channel) -> object:
    return scheduler_pb2_grpc.SchedulerServiceStub(channel).Register
