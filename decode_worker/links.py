"""The links to prefill workers that are open now."""

import asyncio
from collections.abc import Callable

from core import rpc
from core.messages import Endpoint, HandoffHello, HandoffReply, WorkerRef
from decode_worker.prefill_link import PrefillLink


class PrefillLinks:
    """Gives the link to a life of a worker, opening it where there is none that is up."""

    def __init__(
        self,
        hello: Callable[[WorkerRef], HandoffHello],
        tasks: asyncio.TaskGroup,
        *,
        on_message: Callable[[PrefillLink, HandoffReply], None],
        on_down: Callable[[PrefillLink], None],
        dial: rpc.Dial,
    ) -> None:
        self._hello = hello
        self._tasks = tasks
        self._on_message = on_message
        self._on_down = on_down
        self._dial = dial
        self._links: dict[WorkerRef, PrefillLink] = {}

    def get(self, endpoint: Endpoint) -> PrefillLink:
        """The link to this worker; it may not be welcomed yet."""
        link = self._links.get(endpoint.worker)
        if link is None:
            hello = self._hello(endpoint.worker)
            link = PrefillLink(
                endpoint,
                hello,
                on_message=self._on_message,
                on_down=self._down,
                dial=self._dial,
            )
            self._links[endpoint.worker] = link
            self._tasks.create_task(link.run())
        return link

    def _down(self, link: PrefillLink) -> None:
        if self._links.get(link.endpoint.worker) is link:
            del self._links[link.endpoint.worker]
        self._on_down(link)
