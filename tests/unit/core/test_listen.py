"""Sockets that HTTP is served on."""

import asyncio
import socket

import pytest

from core.errors import ConfigError
from core.listen import bind


async def test_what_is_written_is_sent_at_once():
    """asyncio leaves it to whoever made the listener."""
    accepted = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        accepted.set_result(writer.get_extra_info("socket"))
        await reader.read()
        writer.close()

    listener = bind("127.0.0.1", 0, "gateway.http_port")
    async with asyncio.timeout(30), await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        connection = await accepted
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


def test_a_port_that_is_taken_is_refused_by_name():
    with bind("127.0.0.1", 0, "gateway.http_port") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* in use \(gateway.http_port\)"):
            bind("127.0.0.1", port, "gateway.http_port")
