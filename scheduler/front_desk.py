"""Which model's desk a message is for: one desk, with one queue and one cluster, per model.

A worker belongs to the model that its hello names, so that it is no candidate for another's
requests. What a full queue or an empty pool costs one model costs no other one anything.
"""

import asyncio
import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.errors import ModelNotFound, to_failure
from core.health import told_by_model
from core.messages import (
    Enqueue,
    GatewayHello,
    KeepTrace,
    Rejection,
    ScheduleMessage,
    WorkerHello,
)
from scheduler.cluster import Member
from scheduler.desk import Reply, SchedulerDesk
from scheduler.policy import not_ready

_RETRY_AFTER_S = 1.0


class FrontDesk:
    """Owns the desks, by the name of their model."""

    def __init__(self, desks: Sequence[SchedulerDesk]) -> None:
        self.desks: Mapping[str, SchedulerDesk] = {desk.model: desk for desk in desks}
        self._any = desks[0]
        # Requests for models that no desk has, by the code of the error.
        self.num_rejections: collections.Counter[str] = collections.Counter()

    @property
    def gateway_admins(self) -> Mapping[str, str]:
        """Where each gateway says that it is scraped."""
        return self._any.gateway_admins  # every desk hears every hello

    @property
    def members(self) -> dict[str, Member]:
        """The workers of all models."""
        return {key: m for desk in self.desks.values() for key, m in desk.cluster.members.items()}

    def not_ready(self) -> dict[str, str | None]:
        """By model, why no request for it could be placed; None where one could."""
        return {name: not_ready(desk.cluster.view()) for name, desk in self.desks.items()}

    def unable(self) -> str | None:
        """Why no request at all could be placed; None where one for some model could."""
        reasons = self.not_ready()
        return None if None in reasons.values() else told_by_model(reasons)

    def gateway_says(self, gateway: str, message: ScheduleMessage, reply: Reply) -> None:
        """One message of a gateway's stream."""
        match message:
            case GatewayHello():
                for name, desk in self.desks.items():
                    mine = tuple(each for each in message.holdings if each.model == name)
                    desk.gateway_says(gateway, replace(message, holdings=mine), reply)
            case Enqueue():
                if (found := self.desks.get(message.model)) is not None:
                    found.gateway_says(gateway, message, reply)
                else:
                    self._refuse(message, reply)
            case KeepTrace():
                self._any.gateway_says(gateway, message, reply)  # all desks have the same spans
            case _:
                for desk in self.desks.values():
                    if desk.knows(message.transfer):
                        desk.gateway_says(gateway, message, reply)

    def gateway_left(self, gateway: str, reply: Reply) -> None:
        """A gateway's stream ended."""
        for desk in self.desks.values():
            desk.gateway_left(gateway, reply)

    def takes_over(self) -> None:
        """It leads from now on."""
        for desk in self.desks.values():
            desk.takes_over()

    def worker_joined(self, hello: WorkerHello) -> tuple[SchedulerDesk, Member]:
        """A worker's stream began; gives the desk that hears of it from here on.

        Raises ModelNotFound where no desk has its model.
        """
        desk = self.desks.get(hello.model)
        if desk is None:
            raise self._unknown(hello.model)
        return desk, desk.worker_joined(hello)

    async def run(self) -> None:
        """Decides for every model, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for desk in self.desks.values():
                tasks.create_task(desk.run())

    def _refuse(self, message: Enqueue, reply: Reply) -> None:
        failure = to_failure(self._unknown(message.model))
        self.num_rejections[failure.code] += 1
        reply(Rejection(transfer=message.transfer, failure=failure, retry_after_s=_RETRY_AFTER_S))

    def _unknown(self, model: str) -> ModelNotFound:
        return ModelNotFound(
            f"the scheduler knows no model {model!r}; it knows: {', '.join(self.desks)}"
        )
