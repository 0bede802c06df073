"""The transports behind one contract, and the choice among them."""

from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from core.config import TransferConfig
from core.errors import ConfigError, Incompatible, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer import faulty, shm, tcp
from kv_transfer.digest import Blocks
from kv_transfer.metered import MeteredSender


class BlockReceiver(Protocol):
    """How blocks get into a worker's pool, for all its peers.

    `offer` is for one peer. `arrived` is asked after the sender's commit. `revoke` closes a
    transfer's access; it gives True where that alone proves that nothing of it can land any more.
    Where it gives False, the proof is the word of a sender whose writes and flush all succeeded, or
    `is_dead`: that this writer, as it was paired, can write no more. `close` may be called twice.
    """

    @property
    def name(self) -> str: ...
    def offer(self, writer: WorkerRef) -> TransportOffer: ...
    def open(self, transfer: TransferId, block_ids: Sequence[int]) -> None: ...
    async def arrived(self, transfer: TransferId, *, timeout_s: float) -> bool: ...
    def revoke(self, transfer: TransferId) -> bool: ...
    def is_dead(self, writer: WorkerRef) -> bool: ...
    def counters(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class BlockSender(Protocol):
    """How one worker's blocks get into one peer's pool.

    `write` takes uint8 [n], contiguous, for byte `offset` of the receiver's block `target`, which
    is prompt block `index`. It blocks, with a deadline, and the bytes must stay as they are until
    `flush` has returned: then everything written before is out of the sender's memory, and has
    landed where the sender itself writes into the receiver's. Both raise Unavailable where the peer
    is lost; such a sender is of no more use. Called by one thread at a time. `close` may be called
    twice.
    """

    @property
    def name(self) -> str: ...
    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None: ...
    def flush(self, *, timeout_s: float) -> None: ...
    def close(self) -> None: ...


def make_receivers(
    wanted: str,
    me: WorkerRef,
    pool: Blocks,
    segment: shm.Segment | None,
    config: TransferConfig,
    tickets: Tickets,
    *,
    device_pool: Any | None = None,
) -> dict[str, BlockReceiver]:
    """The receivers that a decode worker offers, the preferred one first.

    `pool` is uint8 [num_blocks, block_bytes] in host memory, `device_pool` the like on a GPU where
    the pool is there. Raises ConfigError where `wanted` cannot be had here.
    """
    if wanted in ("auto", shm.NAME) and segment is not None:
        local: dict[str, BlockReceiver] = {shm.NAME: shm.ShmReceiver(segment)}
    elif wanted == shm.NAME:
        raise ConfigError("transfer.transport = 'shm' needs the KV pool in shared memory")
    else:
        local = {}
    host = config.tcp_host
    if wanted in ("auto", "cuda_ipc") and (device_pool is not None or wanted != "auto"):
        from kv_transfer.cuda_ipc import CudaIpcReceiver  # brings torch

        on_gpu: dict[str, BlockReceiver] = {"cuda_ipc": CudaIpcReceiver(device_pool, me)}
        local = on_gpu | local
    match wanted:
        case "auto" | tcp.NAME:
            return {**local, tcp.NAME: tcp.TcpReceiver(pool, me, host, tickets)}
        case shm.NAME | "cuda_ipc":
            return local
        case "collective":
            from kv_transfer.collective import CollectiveReceiver  # brings torch

            return {"collective": CollectiveReceiver(pool, me, host, tickets)}
        case "nixl":
            from kv_transfer.nixl import NixlReceiver

            return {"nixl": NixlReceiver(pool, me, host, tickets)}
    raise ConfigError(f"transfer.transport: {wanted} is none")


def connect(
    offers: Sequence[TransportOffer],
    me: WorkerRef,
    peer: WorkerRef,
    tickets: Tickets,
    *,
    faults: str = "",
) -> MeteredSender:
    """The first of the peer's offers that works from here. Blocks, with a deadline.

    `faults` makes the sender break on purpose (`kv_transfer.faulty`). Raises Incompatible where no
    offer works; its message says why for each.
    """
    log = structlog.get_logger().bind(peer=str(peer))
    reasons: list[str] = []
    for offer in offers:
        try:
            sender = _open(offer, me, peer, tickets)
        except Unavailable as error:
            reasons.append(f"{offer.name}: {error.message}")
            log.warning("kv_transport_failed", transport=offer.name, reason=error.message)
            continue
        log.info("kv_transport_chosen", transport=offer.name, fallbacks=reasons)
        if faults:
            sender = faulty.FaultySender(sender, faults, stream=f"{me.name}/{peer.name}")
        return MeteredSender(sender, peer, num_fallbacks=len(reasons))
    raise Incompatible(f"no common transport ({'; '.join(reasons) or 'none offered'})")


def _open(offer: TransportOffer, me: WorkerRef, peer: WorkerRef, tickets: Tickets) -> BlockSender:
    match offer.name:
        case shm.NAME:
            return shm.ShmSender(offer, me, peer)
        case tcp.NAME:
            return tcp.TcpSender(offer, me, peer, tickets)
        case "collective":
            from kv_transfer.collective import CollectiveSender  # brings torch

            return CollectiveSender(offer, me, peer, tickets)
        case "nixl":
            from kv_transfer.nixl import NixlSender

            return NixlSender(offer, me, peer, tickets)
        case "cuda_ipc":
            from kv_transfer.cuda_ipc import CudaIpcSender  # brings torch

            return CudaIpcSender(offer, me, peer)
    raise Unavailable("unknown here")
