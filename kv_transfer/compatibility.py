"""Whether two workers' KV blocks mean the same."""

from dataclasses import fields

from core.errors import Incompatible
from core.messages import Compatibility
from core.model_card import ModelCard

PROTOCOL_VERSION = 3
LAYOUT = "block,layer,kv,slot,head,dim"  # the order of a block's dimensions, outermost first


def compatibility_of(
    card: ModelCard, *, dtype: str, block_size: int, block_bytes: int
) -> Compatibility:
    """What a worker says of its KV blocks at first contact.

    `block_bytes` is that of one rank with all heads: how many share a worker's model is no matter
    of compatibility, since a sender gives blocks the receiver's layout (`kv_transfer.layout`).
    """
    return Compatibility(
        model=card.name,
        revision=card.revision,
        dtype=dtype,
        block_size=block_size,
        block_bytes=block_bytes,
        layout=LAYOUT,
        protocol=PROTOCOL_VERSION,
    )


def check_compatible(ours: Compatibility, theirs: Compatibility) -> None:
    """Raises Incompatible that names every field that differs."""
    differing = [
        f"{field.name}: {getattr(ours, field.name)} here, {getattr(theirs, field.name)} there"
        for field in fields(Compatibility)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if differing:
        raise Incompatible("; ".join(differing))
