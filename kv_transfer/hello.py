"""How a writer introduces itself to a receiver: who it is, whom it means, and its ticket.

JSON of fixed fields. The receiver computes what the ticket must be from its own life, so that a
hello for another receiver, or for this one before it was started again, is void.
"""

import json

from core.errors import Forbidden
from core.messages import Ticket, WorkerRef
from core.tickets import Claim, Right, Tickets

MAX_HELLO_BYTES = 1024
_LIFETIME_S = 30.0  # from its making to its reading: both are parts of one connect


def make_hello(tickets: Tickets, me: WorkerRef, peer: WorkerRef) -> bytes:
    """What writer `me` says first to receiver `peer`."""
    ticket = tickets.sign(_claim(me, peer), lifetime_s=_LIFETIME_S)
    fields = {
        "writer": [me.name, me.incarnation],
        "receiver": [peer.name, peer.incarnation],
        "expires_unix_s": ticket.expires_unix_s,
        "mac": ticket.mac.hex(),
    }
    return json.dumps(fields).encode()


def check_hello(tickets: Tickets, me: WorkerRef, hello: bytes) -> WorkerRef:
    """Who says it. Raises Forbidden where it is no hello to `me` with a valid ticket."""
    try:
        fields = json.loads(hello)
        name, incarnation = fields["writer"]
        writer = WorkerRef(name=str(name), incarnation=str(incarnation))
        meant = [str(part) for part in fields["receiver"]]
        mac = bytes.fromhex(fields["mac"])
        ticket = Ticket(expires_unix_s=float(fields["expires_unix_s"]), mac=mac)
    except (ValueError, KeyError, TypeError) as error:
        raise Forbidden("not a hello") from error
    if meant != [me.name, me.incarnation]:
        raise Forbidden(f"the hello is for {'/'.join(meant)[:80]}, and this is {me}")
    tickets.check(_claim(writer, me), ticket)
    return writer


def _claim(writer: WorkerRef, receiver: WorkerRef) -> Claim:
    return Claim(right=Right.WRITE, prefill=writer, decode=receiver)
