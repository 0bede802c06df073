"""One life of a decode worker in the model. Mirrors `decode_worker.desk`, call for call.

What the desk awaits is a step of its own here, so that anything can happen in between.
"""

from handoff_model.faults import DeskFault
from handoff_model.network import Kind, Message, Stream, Violation

from core.messages import WorkerRef
from engine.block_manager import BlockManager, LeaseState, OutOfBlocks
from kv_transfer.states import ReceiverAction, ReceiverEvent, ReceiverState

_OPEN = (ReceiverState.OFFERED, ReceiverState.RECEIVING)
_WRITABLE = (LeaseState.IN_TRANSFER, LeaseState.QUARANTINED)


class Session:
    """As `decode_worker.session.Session`."""

    def __init__(self, transfer, prefill, port, lease, num_prompt_blocks, machine):
        self.transfer = transfer
        self.prefill = prefill  # WorkerRef
        self.port = port
        self.lease = lease
        self.prompt_blocks = lease.block_ids[:num_prompt_blocks]
        self.answer_blocks = lease.block_ids[num_prompt_blocks:]
        self.machine = machine
        self.link: Stream | None = None
        self.awaited: Stream | None = None  # the link that `_ask` waits for
        self.commit: Message | None = None
        self.outcome = ""
        self.accept_timer = False
        self.deadline_timer = True
        self.told = 0

    @property
    def state(self):
        return self.machine.state

    def concludes(self, outcome):
        self.outcome = self.outcome or outcome


class Window:
    """As the tcp receiver's: the blocks that one transfer may write."""

    def __init__(self, block_ids):
        self.block_ids = block_ids
        self.arrived: set[int] = set()

    @property
    def full(self):
        return len(self.arrived) == len(self.block_ids)


class Verification:
    """A `_verify` task, which outlives its session where that is stopped meanwhile."""

    def __init__(self, session, link, digests):
        self.session = session
        self.one_sided = link.one_sided
        self.digests = digests
        self.arrived = False
        self.matches: bool | None = None


class DecodeWorker:
    """Its desk, its quarantine, its receivers and its batch."""

    def __init__(self, world, name, incarnation, num_blocks):
        self.world = world
        self.ref = WorkerRef(name=name, incarnation=str(incarnation))
        self.blocks = BlockManager(num_blocks)
        self.content: dict[int, object] = {}
        self.sessions: dict[object, Session] = {}
        self.links: dict[WorkerRef, Stream] = {}
        self.streams: list[Stream] = []  # that this end has not given up
        self.windows: dict[object, Window] = {}
        self.verifications: list[Verification] = []
        self.watched: list[Session] = []
        self.asking: list[Session] = []  # `_ask` tasks
        self.leaving: list[Session] = []  # `_leave_batch` tasks
        self.alive = True
        self.frozen = False

    @property
    def running(self):
        return self.alive and not self.frozen

    # --- what the gateways say -----------------------------------------------------------------

    def start(self, transfer, prefill, port, num_prompt_blocks, num_answer_blocks):
        if transfer in self.sessions:
            return
        try:
            lease = self.blocks.acquire(num_prompt_blocks + num_answer_blocks)
        except OutOfBlocks:
            port.ended(transfer, "error")
            return
        machine = self.world.receiver_machine()
        session = Session(transfer, prefill, port, lease, num_prompt_blocks, machine)
        self.sessions[transfer] = session
        # A short prompt may be read here: the worker's load says so, which is as good as chance.
        if num_prompt_blocks == 1 and self.blocks.num_available % 3 == 0:
            self.happened(session, ReceiverEvent.LOCAL)
            return
        lease.to_transfer()
        session.awaited = self.link_to(prefill)
        self.asking.append(session)

    def can_ask(self, session):
        """Whether what `_ask` awaits has come: a welcome, or the loss of the link."""
        return session.awaited.welcomed or not session.awaited.decode_up

    def ask_goes_on(self, session, *, timed_out=False):
        """`_ask` after its wait for the link's welcome."""
        self.asking.remove(session)
        link = session.awaited
        lost = not link.decode_up and DeskFault.NO_SECOND_LOOK not in self.world.faults
        if timed_out or not link.welcomed or lost:
            session.concludes("error")
            self.happened(session, ReceiverEvent.PEER_LOST)
            return
        if session.state is ReceiverState.RESERVED:
            session.link = link
            if not link.one_sided:
                self.windows[session.transfer] = Window(session.prompt_blocks)
            self.happened(session, ReceiverEvent.ASKED)

    def cancel(self, transfer):
        if (session := self.sessions.get(transfer)) is not None:
            self._stop(session, "cancelled")

    def gateway_left(self, port):
        for session in list(self.sessions.values()):
            if session.port is port:
                self._stop(session, "cancelled")

    def deadline_passes(self, session):
        session.deadline_timer = False
        self._stop(session, "timeout")

    def never_accepted(self, session):
        session.accept_timer = False
        self._stop(session, "error")

    def _stop(self, session, outcome):
        session.concludes(outcome)
        if session.state is ReceiverState.ADOPTED:
            self.leaving.append(session)
        else:
            self.happened(session, ReceiverEvent.STOPPED)

    def left_batch(self, session):
        self.leaving.remove(session)
        self.happened(session, ReceiverEvent.DONE)

    # --- links ---------------------------------------------------------------------------------

    def link_to(self, prefill):
        link = self.links.get(prefill)
        if link is None:
            link = self.links[prefill] = self.world.open_stream(self, prefill)
            self.streams.append(link)
            link.ask(Message(Kind.HELLO))
        return link

    def notices(self, link):
        """The stream ended as seen from here."""
        link.decode_up = False
        link.to_decode.clear()
        self.streams.remove(link)
        if self.links.get(link.prefill.ref) is link:
            del self.links[link.prefill.ref]
        for session in list(self.sessions.values()):
            if session.link is link:
                if session.state in _OPEN:
                    session.concludes("error")
                self.happened(session, ReceiverEvent.PEER_LOST)

    def hears(self, link, message):
        """One message, in the order of its stream."""
        if message.kind is Kind.WELCOME:
            link.welcomed = True
            return
        session = self.sessions.get(message.transfer)
        if session is None or session.link is not link:
            return
        session.accept_timer = False
        match message.kind:
            case Kind.CHUNK:
                self.happened(session, ReceiverEvent.CHUNK)
            case Kind.COMMIT:
                self._committed(session, message)
            case Kind.REFUSED:
                self._prefill_gave_up(session, ReceiverEvent.REFUSED)
            case Kind.QUIESCED:
                self._prefill_gave_up(session, ReceiverEvent.QUIESCED)

    def _prefill_gave_up(self, session, event):
        # After a commit the sender's lease may run out: that is no failure of ours.
        if session.state in _OPEN or DeskFault.LATE_WORD_CONCLUDES in self.world.faults:
            session.concludes("error")
        self.happened(session, event)

    def _committed(self, session, commit):
        if session.state in _OPEN:
            session.commit = commit
        if commit.ended:
            session.concludes("finished")
            self.happened(session, ReceiverEvent.COMMIT_ENDED)
        else:
            self.happened(session, ReceiverEvent.COMMIT)

    # --- blocks --------------------------------------------------------------------------------

    def lands(self, transfer, block, value):
        """A write reaches this worker's memory."""
        if not self.holds(transfer, block):
            raise Violation(f"a write of {transfer} landed in block {block}, which is not its own")
        self.content[block] = value

    def holds(self, transfer, block):
        """Whether `transfer` may still be written into `block`."""
        session = self.sessions.get(transfer)
        return (
            session is not None
            and block in session.prompt_blocks
            and session.lease.state in _WRITABLE
        )

    def frame_arrives(self, write):
        """A frame of a receiver-written transport: dropped where its window is closed."""
        window = self.windows.get(write.transfer)
        if window is not None and write.index not in window.arrived:
            self.lands(write.transfer, window.block_ids[write.index], write.value)
            window.arrived.add(write.index)

    def revoke(self, session):
        """True: from now on nothing of this transfer can land."""
        self.windows.pop(session.transfer, None)
        return not session.link.one_sided

    # --- verification --------------------------------------------------------------------------

    def can_verify(self, task):
        """Whether `task` waits for nothing but its turn."""
        window = self.windows.get(task.session.transfer)
        return task.arrived or task.one_sided or window is None or window.full

    def verify_goes_on(self, task, *, timed_out=False):
        session = task.session
        if not task.arrived:
            window = self.windows.get(session.transfer)
            if timed_out or not (task.one_sided or (window is not None and window.full)):
                self.verifications.remove(task)
                session.concludes("error")
                self.happened(session, ReceiverEvent.CORRUPT)
            task.arrived = True
        elif task.matches is None:
            found = [
                (session.transfer, i, self.content.get(block))
                for i, block in enumerate(session.prompt_blocks)
            ]
            task.matches = tuple(found) == task.digests
        else:
            self.verifications.remove(task)
            if not task.matches:
                session.concludes("error")
            event = ReceiverEvent.VERIFIED if task.matches else ReceiverEvent.CORRUPT
            self.happened(session, event)

    # --- the batch -----------------------------------------------------------------------------

    def finishes(self, session):
        """A step samples the last token of a sequence."""
        if not session.outcome:
            session.concludes("finished")
            self.happened(session, ReceiverEvent.DONE)

    # --- the machine's actions -----------------------------------------------------------------

    def happened(self, session, event):
        for action in session.machine.move(event):
            match action:
                case ReceiverAction.SEND_PREFILL:
                    session.accept_timer = True
                    session.link.ask(
                        Message(
                            Kind.PREFILL,
                            session.transfer,
                            prefill=session.prefill,
                            decode=self.ref,
                            block_ids=session.prompt_blocks,
                        )
                    )
                case ReceiverAction.SEND_ADOPTED:
                    session.link.ask(Message(Kind.ADOPTED, session.transfer))
                case ReceiverAction.SEND_CANCEL:
                    session.link.ask(Message(Kind.CANCEL, session.transfer))
                case ReceiverAction.VERIFY:
                    task = Verification(session, session.link, session.commit.digests)
                    self.verifications.append(task)
                case ReceiverAction.ADOPT:
                    self._adopt(session)
                case ReceiverAction.QUARANTINE:
                    session.lease.quarantine()
                case ReceiverAction.SEEK_PROOF:
                    self._seek_proof(session)
                case ReceiverAction.FREE:
                    self._free(session)
                case ReceiverAction.FAIL | ReceiverAction.END:
                    session.told += 1
                    session.port.ended(session.transfer, session.outcome)

    def _adopt(self, session):
        if session.commit is None:  # read here: this worker writes its prompt's blocks itself
            for index, block in enumerate(session.prompt_blocks):
                self.content[block] = (session.transfer, index)
        else:
            self.revoke(session)
            session.lease.to_owned()
        for index, block in enumerate(session.answer_blocks):
            self.content[block] = (f"answer of {session.transfer}", index)

    def _free(self, session):
        session.deadline_timer = session.accept_timer = False
        if session.link is not None:
            self.revoke(session)
        session.lease.release()
        del self.sessions[session.transfer]

    # --- the quarantine ------------------------------------------------------------------------

    def _seek_proof(self, session):
        if self.revoke(session):
            self.happened(session, ReceiverEvent.PROVEN)
        elif session not in self.watched:
            self.watched.append(session)

    def can_check(self, session):
        """Whether a look at this session in quarantine would change something."""
        if session.state is not ReceiverState.QUARANTINED:
            return True
        if session.link.decode_up:
            return False
        again = self.links.get(session.prefill)
        return again is None or again.welcomed or self.world.is_dead(session.prefill, self)

    def quarantine_checks(self, session):
        if session.state is not ReceiverState.QUARANTINED:
            self.watched.remove(session)
        elif session.link.decode_up:
            return
        elif self.world.is_dead(session.prefill, self):
            self.happened(session, ReceiverEvent.PROVEN)
        else:
            again = self.link_to(session.prefill)
            if again.welcomed:
                session.link = again
                again.ask(Message(Kind.CANCEL, session.transfer))

    # --- promises ------------------------------------------------------------------------------

    def check(self):
        self.blocks.check()
        for session in self.sessions.values():
            state = session.state
            over = state in (ReceiverState.QUARANTINED, ReceiverState.FREED)
            if session.told != (1 if over else 0):
                raise Violation(f"{session.transfer} in {state} has told {session.told} outcomes")
            if state is ReceiverState.QUARANTINED:
                expected = LeaseState.QUARANTINED
            elif state is ReceiverState.ADOPTED:
                expected = LeaseState.OWNED
                self._check_content(session)
            else:
                expected = LeaseState.IN_TRANSFER
            if session.lease.state is not expected:
                raise Violation(f"blocks of {session.transfer} in {state}: {session.lease.state}")
        if not self.windows.keys() <= self.sessions.keys():
            raise Violation(f"{self.ref} has windows of transfers that are over")

    def _check_content(self, session):
        for index, block in enumerate(session.prompt_blocks):
            if self.content.get(block) != (session.transfer, index):
                found = self.content.get(block)
                raise Violation(f"{session.transfer} decodes from {found} as its block {index}")
        for index, block in enumerate(session.answer_blocks):
            if self.content.get(block) != (f"answer of {session.transfer}", index):
                raise Violation(f"somebody wrote over the answer of {session.transfer}")
