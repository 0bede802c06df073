"""Blocks that a failed transfer may still write into, and the search for proof that it cannot.

An error, a timeout or a lost stream is no proof where the peer writes into our memory itself: a
process stopped just before its copy writes when it goes on. The proof is the sender's own word
(asked for again on each new stream to it), its death, or an access that we can revoke.
"""

import asyncio
from collections.abc import Callable, Mapping

from core.messages import CancelTransfer
from decode_worker.links import PrefillLinks
from decode_worker.session import Session
from kv_transfer.states import ReceiverState
from kv_transfer.transport import BlockReceiver

_POLL_S = 0.2  # no event tells of the death of a process that is not our child


class Quarantine:
    """Watches the sessions in quarantine whose sender cannot answer."""

    def __init__(
        self,
        links: PrefillLinks,
        receivers: Mapping[str, BlockReceiver],
        *,
        on_proven: Callable[[Session], None],
    ) -> None:
        self._links = links
        self._receivers = receivers
        self._on_proven = on_proven
        self._watched: set[Session] = set()
        self._wake = asyncio.Event()

    def seek_proof(self, session: Session) -> None:
        """At once where revoking is proof; else the sender is watched."""
        assert session.link is not None
        if self._receivers[session.link.transport].revoke(session.transfer):
            self._on_proven(session)
        else:
            self._watched.add(session)
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Sleeps while nothing is in quarantine."""
        while True:
            await self._wake.wait()
            for session in list(self._watched):
                if session.state is not ReceiverState.QUARANTINED:
                    self._watched.discard(session)
                else:
                    self._check(session)
            if self._watched:
                await asyncio.sleep(_POLL_S)
            else:
                self._wake.clear()

    def _check(self, session: Session) -> None:
        link = session.link
        assert link is not None
        if link.up:
            return  # it was asked, and will answer or go down
        if self._receivers[link.transport].is_dead(session.prefill_worker):
            self._on_proven(session)
            return
        again = self._links.get(session.prefill)
        if again.transport:  # welcomed: the same life of the worker is back on a new stream
            session.link = again
            again.send(CancelTransfer(transfer=session.transfer))
