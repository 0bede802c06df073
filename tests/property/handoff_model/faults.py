"""Mistakes around right tables, for the tests that show that the model finds them."""

import enum


class DeskFault(enum.Enum):
    """Each one is a way to handle the machines' actions that looks right and is not."""

    # A receiver's new stream is welcomed while an older one of it is still served. On the new one
    # it is told that nothing of a transfer will be written; then the order for it is read from the
    # old one, or a failed write of the old one lands.
    WELCOMED_TOO_EARLY = "welcomed too early"
    # The same, but orders count on that stream alone that was paired last. An older one may be
    # paired later, and then the orders on the living one are dropped; a cancel that is read late
    # from the older one takes the answer away; and failed writes land as before.
    LAST_PAIRED_ORDERS = "last paired orders"
    # A link that went down between its welcome and the order is not looked at again: its loss has
    # been reported already, so nobody ever reports it to this request.
    NO_SECOND_LOOK = "no second look"
    # A sender's last word after its commit counts as the request's failure, so that its tokens are
    # held back as those of a stopped request while nobody stops it.
    LATE_WORD_CONCLUDES = "late word concludes"
