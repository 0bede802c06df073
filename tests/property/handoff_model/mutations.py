"""Wrong edges, one at a time, for the tests that show that the interleavings find each of them."""

from kv_transfer.states import (
    RECEIVER,
    SENDER,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderAction,
    SenderEvent,
    SenderState,
)

_R, _RE, _RA = ReceiverState, ReceiverEvent, ReceiverAction
_S, _SE, _SA = SenderState, SenderEvent, SenderAction

# name -> (state, event), (the wrong next state, the wrong actions)
_RECEIVER = {
    "a lost stream frees what was asked for": (
        (_R.OFFERED, _RE.PEER_LOST),
        (_R.FREED, (_RA.FREE, _RA.FAIL)),
    ),
    "a lost stream frees what is being written": (
        (_R.RECEIVING, _RE.PEER_LOST),
        (_R.FREED, (_RA.FREE, _RA.FAIL)),
    ),
    "a stop skips the quarantine": (
        (_R.OFFERED, _RE.STOPPED),
        (_R.FREED, (_RA.SEND_CANCEL, _RA.FREE, _RA.FAIL)),
    ),
    "a stop in the middle of the writes skips the quarantine": (
        (_R.RECEIVING, _RE.STOPPED),
        (_R.FREED, (_RA.SEND_CANCEL, _RA.FREE, _RA.FAIL)),
    ),
    "a lost stream ends the quarantine": (
        (_R.QUARANTINED, _RE.PEER_LOST),
        (_R.FREED, (_RA.FREE,)),
    ),
    "a chunk ends the quarantine": (
        (_R.QUARANTINED, _RE.CHUNK),
        (_R.FREED, (_RA.FREE,)),
    ),
    "blocks are freed twice": (
        (_R.QUARANTINED, _RE.QUIESCED),
        (_R.FREED, (_RA.FREE, _RA.FREE)),
    ),
    "proven blocks stay": (
        (_R.QUARANTINED, _RE.PROVEN),
        (_R.FREED, ()),
    ),
    "a refusal is told to nobody": (
        (_R.OFFERED, _RE.REFUSED),
        (_R.FREED, (_RA.FREE,)),
    ),
    "a stop is told to nobody": (
        (_R.OFFERED, _RE.STOPPED),
        (_R.QUARANTINED, (_RA.QUARANTINE, _RA.SEND_CANCEL, _RA.SEEK_PROOF)),
    ),
    "a failure is told twice": (
        (_R.QUARANTINED, _RE.QUIESCED),
        (_R.FREED, (_RA.FREE, _RA.FAIL)),
    ),
    "an end is told to nobody": (
        (_R.ADOPTED, _RE.DONE),
        (_R.FREED, (_RA.FREE,)),
    ),
    "an end on the first token is told to nobody": (
        (_R.RECEIVING, _RE.COMMIT_ENDED),
        (_R.FREED, (_RA.SEND_ADOPTED, _RA.FREE)),
    ),
    "blocks are adopted unverified": (
        (_R.RECEIVING, _RE.COMMIT),
        (_R.ADOPTED, (_RA.ADOPT, _RA.SEND_ADOPTED)),
    ),
    "damaged blocks are adopted": (
        (_R.COMMITTED, _RE.CORRUPT),
        (_R.ADOPTED, (_RA.ADOPT, _RA.SEND_ADOPTED)),
    ),
    "a stopped request is adopted": (
        (_R.QUARANTINED, _RE.VERIFIED),
        (_R.ADOPTED, (_RA.ADOPT, _RA.SEND_ADOPTED)),
    ),
    "a freed request is adopted": (
        (_R.FREED, _RE.VERIFIED),
        (_R.ADOPTED, (_RA.ADOPT, _RA.SEND_ADOPTED)),
    ),
    "the sender is not told of a stop": (
        (_R.OFFERED, _RE.STOPPED),
        (_R.QUARANTINED, (_RA.QUARANTINE, _RA.FAIL, _RA.SEEK_PROOF)),
    ),
    "nobody looks for proof": (
        (_R.OFFERED, _RE.PEER_LOST),
        (_R.QUARANTINED, (_RA.QUARANTINE, _RA.FAIL)),
    ),
    "the sender is not told of the adoption": (
        (_R.COMMITTED, _RE.VERIFIED),
        (_R.ADOPTED, (_RA.ADOPT,)),
    ),
    "a sender's loss after its commit fails the request": (
        (_R.COMMITTED, _RE.PEER_LOST),
        (_R.QUARANTINED, (_RA.FAIL, _RA.SEEK_PROOF)),
    ),
}
_SENDER = {
    "a cancel frees what is being written": (
        (_S.SENDING, _SE.CANCEL),
        (_S.RELEASED, (_SA.RELEASE, _SA.SEND_QUIESCED)),
    ),
    "a cancel frees what is being computed": (
        (_S.ACCEPTED, _SE.CANCEL),
        (_S.RELEASED, (_SA.RELEASE, _SA.SEND_QUIESCED)),
    ),
    "a lost receiver frees what is being written": (
        (_S.SENDING, _SE.PEER_LOST),
        (_S.RELEASED, (_SA.RELEASE, _SA.SEND_QUIESCED)),
    ),
    "a failed write frees what is being written": (
        (_S.SENDING, _SE.GIVE_UP),
        (_S.RELEASED, (_SA.RELEASE, _SA.SEND_QUIESCED)),
    ),
    "a second cancel is answered before the writes have ended": (
        (_S.DRAINING, _SE.CANCEL),
        (_S.DRAINING, (_SA.SEND_QUIESCED,)),
    ),
    "the end of the drain is told to nobody": (
        (_S.DRAINING, _SE.DRAINED),
        (_S.RELEASED, (_SA.RELEASE,)),
    ),
    "drained blocks stay": (
        (_S.DRAINING, _SE.DRAINED),
        (_S.RELEASED, (_SA.SEND_QUIESCED,)),
    ),
    "blocks are released twice": (
        (_S.COMMIT_SENT, _SE.ADOPTED),
        (_S.RELEASED, (_SA.RELEASE, _SA.RELEASE)),
    ),
    "a cancel after the commit is not answered": (
        (_S.COMMIT_SENT, _SE.CANCEL),
        (_S.RELEASED, (_SA.RELEASE,)),
    ),
    "the commit overtakes the last chunk": (
        (_S.SENDING, _SE.CHUNK),
        (_S.COMMIT_SENT, (_SA.WRITE, _SA.SEND_COMMIT)),
    ),
    "the commit is forgotten": (
        (_S.SENDING, _SE.WRITTEN),
        (_S.COMMIT_SENT, ()),
    ),
    "a receiver's loss after the commit is waited out": (
        (_S.COMMIT_SENT, _SE.PEER_LOST),
        (_S.COMMIT_SENT, ()),
    ),
    "nothing is drained": (
        (_S.ACCEPTED, _SE.PEER_LOST),
        (_S.DRAINING, ()),
    ),
}

# name -> the settings of a world with that one wrong edge
MUTATIONS = {
    name: {"receiver": {**RECEIVER, edge: wrong}} for name, (edge, wrong) in _RECEIVER.items()
} | {name: {"sender": {**SENDER, edge: wrong}} for name, (edge, wrong) in _SENDER.items()}
