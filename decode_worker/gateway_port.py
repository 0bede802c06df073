"""One gateway as a decode worker sees it: everything of one step goes out as one message."""

import asyncio

from core.messages import Ended, StepOutput, Tokens, WorkerRef
from core.stream import Outbox
from protos.tandem.internal.v1 import decode_pb2


class GatewayPort:
    """Collects what happens in one turn of the event loop, and sends it at the turn's end."""

    def __init__(self, gateway: WorkerRef, outbox: Outbox[decode_pb2.AttachResponse]) -> None:
        self.gateway = gateway
        self._outbox = outbox
        self._tokens: list[Tokens] = []
        self._ended: list[Ended] = []

    def tokens(self, tokens: Tokens) -> None:
        """Tokens of one request."""
        self._schedule()
        self._tokens.append(tokens)

    def ended(self, ended: Ended) -> None:
        """One request ended; after its tokens."""
        self._schedule()
        self._ended.append(ended)

    def _schedule(self) -> None:
        if not self._tokens and not self._ended:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        output = StepOutput(tokens=tuple(self._tokens), ended=tuple(self._ended))
        self._tokens, self._ended = [], []
        if not self._outbox.send(output):
            # A gateway that reads nothing is lost to us; its stream's end cancels its requests.
            self._outbox.close()
