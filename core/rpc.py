"""gRPC as this project uses it: message limits, keepalive, servers and channels."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc

MAX_MESSAGE_BYTES = 64 * 2**20
# Pings find a dead peer on a silent connection. A server refuses pings that come faster than it
# allows, so both sides take their numbers from here.
_KEEPALIVE_TIME_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # What a ping waits for is this one; the keepalive timeout alone ends nothing.
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_TIME_MS // 2),
    ("grpc.so_reuseport", 0),
    # Pools of subchannels are shared by equal arguments; a restarted peer needs a fresh one.
    ("grpc.use_local_subchannel_pool", 1),
)

# The public side: clients are many and far, so pings are rarer. A server hangs up on clients that
# ping more often than it allows; what is allowed lies well below what CLIENT_OPTIONS asks for.
PUBLIC_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)
# For a client of the public side.
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


# All that a client learns of a server that turns it away.
_HUNG_UP = "it hung up, as who has internal_tls does where no certificate of its CA is shown"
# What gRPC says where a peer is there and the connection comes to nothing, and what that means.
_REFUSALS = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the CA in internal_tls.ca_file"),
    ("Hostname Verification", "its certificate does not have the name in internal_tls.name"),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS: internal_tls is not set there"),
    ("Socket closed", _HUNG_UP),
    ("Connection reset", _HUNG_UP),
)

# Makes a channel to a process of this cluster, at a gRPC target.
Dial = Callable[[str], grpc.aio.Channel]


def channel(address: str) -> grpc.aio.Channel:
    """A channel to a process of this cluster. Not for the public side."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def server() -> grpc.aio.Server:
    """A server for a process of this cluster."""
    return grpc.aio.server(options=OPTIONS)


def refusal(error: grpc.RpcError) -> str | None:
    """Why a process that is there did not become our peer; None where that is not what failed."""
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else None
    if not details or not details.startswith("failed to connect"):
        return None
    return next((meaning for words, meaning in _REFUSALS if words in details), None)


async def stop_server(running: grpc.aio.Server, grace_s: float) -> None:
    """Stops a server; calls that outlast the grace are cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        await running.stop(grace_s)
