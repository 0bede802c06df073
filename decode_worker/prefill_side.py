"""The receiver's half of the hand-off: asks prefill workers, hears them, proves what arrived.

What they say, or that they were lost, becomes events of a session's machine; the desk carries the
machine's actions out and calls back in here for those that face a prefill worker.
"""

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from core import rpc
from core.config import TransferConfig
from core.errors import DataLoss, Incompatible, TandemError, Unavailable, WorkerLost, to_failure
from core.messages import (
    Accepted,
    Adopted,
    CancelTransfer,
    ChunkSent,
    Commit,
    Compatibility,
    Failure,
    HandoffHello,
    HandoffReply,
    KeepTrace,
    Prefill,
    PromptScored,
    Quiesced,
    Refused,
    StopReason,
    TransferId,
    WorkerRef,
)
from decode_worker.links import PrefillLinks
from decode_worker.prefill_link import PrefillLink
from decode_worker.quarantine import Quarantine
from decode_worker.session import Session
from kv_transfer.blocks import BlockStore
from kv_transfer.states import ReceiverEvent, ReceiverState
from kv_transfer.transport import BlockReceiver


class PrefillSide:
    """Owns the links, the receivers' windows and the quarantine; the desk owns the sessions.

    `happened` is the desk's: an event came for this session.
    """

    def __init__(
        self,
        me: WorkerRef,
        compatibility: Compatibility,
        blocks: BlockStore,
        receivers: Mapping[str, BlockReceiver],
        config: TransferConfig,
        *,
        ranks: int,
        sessions: Mapping[TransferId, Session],
        counts: Counter[str],
        tasks: asyncio.TaskGroup,
        happened: Callable[[Session, ReceiverEvent], None],
        dial: rpc.Dial,
    ) -> None:
        self._me = me
        self._ranks = ranks
        self._compatibility = compatibility
        self._blocks = blocks
        self._receivers = receivers
        self._config = config
        self._sessions = sessions
        self._counts = counts
        self._happened = happened
        # What the last prefill worker could not work with; None where it could.
        self.incompatible: str | None = None
        self._log = structlog.get_logger()
        self._links = PrefillLinks(
            self._hello, tasks, on_message=self._says, on_down=self._link_lost, dial=dial
        )
        self._quarantine = Quarantine(self._links, receivers, on_proven=self._proven)

    async def run(self) -> None:
        """Watches the blocks in quarantine, until cancelled."""
        await self._quarantine.run()

    def counters(self) -> dict[str, int]:
        """What the transports count."""
        return {
            f"{receiver.name}_{key}": n
            for receiver in self._receivers.values()
            for key, n in receiver.counters().items()
        }

    async def ask(self, session: Session) -> None:
        """Has the link ready, opens the blocks to it, and only then asks for the prefill."""
        link = self._links.get(session.prefill)
        try:
            async with asyncio.timeout(self._config.accept_timeout_s):
                await asyncio.shield(link.welcomed)
        except (TandemError, TimeoutError) as error:
            if isinstance(error, Incompatible):
                self.incompatible = f"{session.prefill_worker}: {error.message}"
            if not isinstance(error, TandemError):
                error = self._silent(session)
            session.concludes(StopReason.ERROR, to_failure(error))
            self._happened(session, ReceiverEvent.PEER_LOST)
            return
        if not link.up:  # since its welcome: its loss was reported before this request was on it
            session.concludes(StopReason.ERROR, to_failure(_lost(link)))
            self._happened(session, ReceiverEvent.PEER_LOST)
        elif session.state is ReceiverState.RESERVED:  # else it was stopped meanwhile
            session.link = link
            self.incompatible = None
            self._counts["grants"] += 1
            self._receivers[link.transport].open(session.transfer, session.awaited_blocks)
            self._happened(session, ReceiverEvent.ASKED)

    def send_prefill(self, session: Session, *, never_accepted: Callable[[Failure], None]) -> None:
        """The order itself. `never_accepted` is called where it goes unanswered."""
        start = session.start
        session.asked_s = time.monotonic()
        assert session.link is not None
        session.spans.asks(
            session.asked_s,
            str(session.prefill_worker),
            session.link.transport,
            len(session.awaited_blocks),
        )
        keep = KeepTrace(request_id=start.transfer.request_id)
        session.spans.trace.on_keep(functools.partial(session.link.send, keep))
        order = Prefill(
            transfer=start.transfer,
            prefill=session.prefill_worker,
            token_ids=session.known_token_ids,
            num_prompt_tokens=len(start.prompt_token_ids),
            ticket=start.ticket,
            sampling=start.sampling,
            choice=session.lead.choice,
            shared=len(start.branches) > 1,
            block_ids=session.awaited_blocks,
            first_block=session.num_cached_blocks,
            cache_salt=start.cache_salt,
            remaining_s=start.remaining_s - (session.asked_s - session.started_s),
            trace_context=session.spans.trace_context,
        )
        session.accept_timer = asyncio.get_running_loop().call_later(
            self._config.accept_timeout_s, lambda: never_accepted(to_failure(self._silent(session)))
        )
        self.send(session, order)  # a link lost right now reports it by itself

    def send(self, session: Session, message: Adopted | CancelTransfer | Prefill) -> bool:
        """False where the prefill worker will not get it."""
        return session.link is not None and session.link.send(message)

    async def verify(self, session: Session) -> None:
        """Waits for the last bytes and compares every block's digest with the sender's."""
        commit, link = session.commit, session.link
        assert commit is not None and link is not None
        receiver = self._receivers[link.transport]
        if not await receiver.arrived(session.transfer, timeout_s=self._config.arrive_timeout_s):
            lost = Unavailable("KV blocks did not arrive", culprit=link.endpoint.worker)
            session.concludes(StopReason.ERROR, to_failure(lost))
            self._happened(session, ReceiverEvent.CORRUPT)
            return
        digests = await asyncio.to_thread(
            self._blocks.digests, session.transfer, 0, session.awaited_blocks, link.transport
        )
        if digests == commit.digests and session.state is ReceiverState.COMMITTED:
            # Here and now, since nobody may take the blocks meanwhile. Costs nothing but where
            # a GPU's blocks came through the host.
            self._blocks.landed(session.awaited_blocks, link.transport)
        if digests == commit.digests or session.state is not ReceiverState.COMMITTED:
            # Stopped meanwhile: its blocks may be another's by now, and say nothing of this one.
            self._happened(session, ReceiverEvent.VERIFIED)
            return
        self._counts["integrity_failures"] += 1
        self._log.error(
            "kv_digest_mismatch", request=str(session.transfer), transport=receiver.name
        )
        wrong = DataLoss("KV blocks arrived damaged", culprit=link.endpoint.worker)
        session.concludes(StopReason.ERROR, to_failure(wrong))
        self._happened(session, ReceiverEvent.CORRUPT)

    def close_access(self, session: Session) -> None:
        """Nothing more may be written into the session's blocks."""
        if session.link is not None and session.link.transport:
            self._receivers[session.link.transport].revoke(session.transfer)

    def seek_proof(self, session: Session) -> None:
        """Finds out when nothing more can land in the session's blocks."""
        self._quarantine.seek_proof(session)

    def _hello(self, peer: WorkerRef) -> HandoffHello:
        return HandoffHello(
            decode=self._me,
            compatibility=self._compatibility,
            offers=tuple(receiver.offer(peer) for receiver in self._receivers.values()),
            ranks=self._ranks,
        )

    def _says(self, link: PrefillLink, message: HandoffReply) -> None:
        session = self._sessions.get(getattr(message, "transfer"))  # noqa: B009
        if session is None or session.link is not link:
            self._counts["stale_messages"] += 1
            return
        if session.accept_timer is not None:
            session.accept_timer.cancel()
        match message:
            case Accepted():
                pass
            case ChunkSent():
                self._happened(session, ReceiverEvent.CHUNK)
            case PromptScored():
                if session.outcome is StopReason.UNSPECIFIED:
                    session.port.tokens(session.scored(message.logprobs))
            case Commit():
                self._committed(session, message)
            case Refused():
                self._failed(session, ReceiverEvent.REFUSED, message.failure)
            case Quiesced():
                gave_up = Unavailable("the prefill worker gave up", culprit=link.endpoint.worker)
                failure = message.failure or to_failure(gave_up)
                self._failed(session, ReceiverEvent.QUIESCED, failure)

    def _failed(self, session: Session, event: ReceiverEvent, failure: Failure) -> None:
        """The sender failed it; after the commit that is no failure of ours any more."""
        if session.state in (ReceiverState.OFFERED, ReceiverState.RECEIVING):
            session.concludes(StopReason.ERROR, failure)
        self._happened(session, event)

    def _committed(self, session: Session, commit: Commit) -> None:
        if session.state in (ReceiverState.OFFERED, ReceiverState.RECEIVING):
            session.commit = commit
            session.committed_s = time.monotonic()
            session.spans.committed(session.committed_s)
        if commit.stop_reason is StopReason.UNSPECIFIED or len(session.start.branches) > 1:
            self._happened(session, ReceiverEvent.COMMIT)
        else:
            session.concludes(commit.stop_reason)
            self._happened(session, ReceiverEvent.COMMIT_ENDED)

    def _link_lost(self, link: PrefillLink) -> None:
        failure = to_failure(_lost(link))
        for session in list(self._sessions.values()):
            if session.link is link:
                self._failed(session, ReceiverEvent.PEER_LOST, failure)

    def _proven(self, session: Session) -> None:
        self._happened(session, ReceiverEvent.PROVEN)

    def _silent(self, session: Session) -> WorkerLost:
        return WorkerLost(
            f"prefill worker {session.prefill_worker} did not answer within "
            f"{self._config.accept_timeout_s} s",
            culprit=session.prefill_worker,
        )


def _lost(link: PrefillLink) -> WorkerLost:
    worker = link.endpoint.worker
    return WorkerLost(f"prefill worker {worker} is lost", culprit=worker)
