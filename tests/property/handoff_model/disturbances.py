"""What can disturb a model world: each kind gives the moves that are possible now, as callables."""

from functools import partial

from handoff_model.network import TO_PREFILL, Kind
from handoff_model.prefill import PrefillWorker

_CANCELLABLE = 8  # the youngest attempts; older ones ended long ago


def cancels(world):
    """A client leaves: also long after its request ended."""
    return [
        partial(port.orders.append, ("cancel", transfer, None))
        for transfer, port in list(world.asked.items())[-_CANCELLABLE:]
        if port.up
    ]


def timers(world):
    """Every timer that is armed."""
    moves = []
    for decode in world.decodes.values():
        if decode.running:
            moves += [partial(decode.ask_goes_on, each, timed_out=True) for each in decode.asking]
            for session in decode.sessions.values():
                if session.deadline_timer:
                    moves.append(partial(decode.deadline_passes, session))
                if session.accept_timer:
                    moves.append(partial(decode.never_accepted, session))
    for prefill in world.prefills.values():
        if prefill.running:
            for sending in prefill.sendings.values():
                if sending.timer is not None:
                    moves.append(partial(prefill.timer_fires, sending))
            for sending in prefill.engine:
                if sending.in_engine and not sending.in_step:
                    moves.append(partial(prefill.gives_up, sending))  # the step failed
    return moves + world.arrival_timers()


def breaks(world):
    """A stream breaks; of what is under way nothing, the first message or all still arrives."""
    return [
        partial(_break, link, keep)
        for decode in world.decodes.values()
        for link in decode.streams
        if not link.broken
        for keep in (0, 1, 99)
    ]


def stalls(world):
    """A stream's messages stand still, or go on."""
    streams = {id(each): each for worker in world.workers for each in worker.streams}
    return [partial(setattr, each, "stalled", not each.stalled) for each in streams.values()]


def hang_ups(world):
    """One end takes the other for lost: it was silent, or so it seemed."""
    moves = [
        partial(decode.notices, link)
        for decode in world.decodes.values()
        if decode.running
        for link in decode.streams
    ]
    return moves + [
        partial(prefill.notices, stream)
        for prefill in world.prefills.values()
        if prefill.running
        for stream in prefill.streams
    ]


def freezes(world):
    """SIGSTOP for who runs; SIGCONT where somebody stands still."""
    frozen = [worker for worker in world.workers if worker.frozen]
    alive = [worker for worker in world.workers if worker.alive]
    return [partial(setattr, each, "frozen", not each.frozen) for each in frozen or alive]


def deaths(world):
    """SIGKILL for who lives; a new life where somebody is dead."""
    dead = [partial(world.restart, worker) for worker in world.workers if not worker.alive]
    return dead or [partial(world.kill, worker) for worker in world.workers]


def damages(world):
    """Writes in flight that change on their way, fail, or are lost with their connection."""
    moves = []
    for prefill in world.lives.values():
        if isinstance(prefill, PrefillWorker):
            for peer in prefill.peers:
                moves += [
                    partial(setattr, write, "value", ("damaged", 0))
                    for write in [*peer.pending, *peer.frames]
                ]
                if peer.current is not None and not peer.failing:
                    moves.append(partial(setattr, peer, "failing", True))
                if peer.frames and (peer.failing or not prefill.alive):
                    moves.append(peer.frames.clear)
    return moves


def replays(world):
    """A message of the past comes again, on a stream of now between the same two names."""
    moves = []
    for old, message in world.history:
        decode = world.decodes[old.decode.ref.name]
        prefill = world.prefills[old.prefill.ref.name]
        if message.kind not in TO_PREFILL:
            if message.kind is not Kind.WELCOME and decode.running:
                moves += [
                    partial(decode.hears, link, message)
                    for link in decode.streams
                    if link.prefill is prefill
                ]
        elif prefill.running:
            # Within one life of both, a stream brings each order once.
            fresh = message.kind is Kind.PREFILL and message.transfer not in prefill.sendings
            if not (fresh and (message.prefill, message.decode) == (prefill.ref, decode.ref)):
                moves += [
                    partial(prefill.hears, stream, message)
                    for stream in prefill.streams
                    if stream.decode is decode and stream.peer is not None
                ]
    return moves


def gateway_losses(world):
    """A gateway's stream to a decode worker ends, as the gateway sees it."""
    return [partial(world.lose_port, port) for port in world.ports.values() if port.up]


def _break(stream, keep):
    stream.broken = True
    for queue in (stream.to_prefill, stream.to_decode):
        while len(queue) > keep:
            queue.pop()


# By name, for drawing and for reading what was drawn.
DISTURBANCES = {
    "cancels": cancels,
    "timers": timers,
    "breaks": breaks,
    "hang_ups": hang_ups,
    "stalls": stalls,
    "damages": damages,
    "replays": replays,
    "freezes": freezes,
    "deaths": deaths,
    "gateway_losses": gateway_losses,
}
