"""Listening for HTTP: a socket that is bound or refused in one clear line, and a server on it."""

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn

from core.errors import ConfigError


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError naming the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # No SO_REUSEPORT: two servers on one port would each get some of the connections.
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "is in use" if in_use else f"cannot be listened on: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {reason} ({setting})") from error
    # Its connections inherit this. asyncio passes over them, as `create_server` names no protocol:
    # a body would wait behind its headers, or a token behind the one before, for up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process owns its signals (`core.process`)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
