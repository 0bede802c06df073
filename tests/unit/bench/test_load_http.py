"""The client's reading of responses: HTTP, then events, whatever the pieces they come in."""

import asyncio

import pytest

from bench.load.http_stream import Address, _Exchange
from bench.load.sse import SseReader
from core.errors import InvalidRequest, Unavailable

STREAM = (
    b"data: one\r\n\r\n: keepalive\n\ndata: two\n\nevent: x\ndata:three\ndata: four\n\ndata: half"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_are_the_same_whatever_pieces_they_come_in(size: int):
    reader = SseReader()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [data for piece in pieces for data in reader.feed(piece)] == [
        b"one",
        b"two",
        b"three\nfour",
    ]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://example.org/api/v1", "https://example.org:443/api"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_is_that_of_the_api_with_or_without_its_version(url: str, shown: str):
    assert Address.parse(url).url == shown


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://", "http://x:99999", ""])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(InvalidRequest, match="is not a URL"):
        Address.parse(url)


async def _read(*pieces: bytes, lost: bool = False) -> tuple[int, bytes]:
    bodies: list[bytes] = []
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    exchange = _Exchange(b"", lambda status, body, at_s: bodies.append(body), ended)
    for piece in pieces:
        exchange.data_received(piece)
    if lost:
        exchange.connection_lost(None)
    return await asyncio.wait_for(ended, 1), b"".join(bodies)


async def test_a_chunked_response_is_read_without_its_framing():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert await _read(head + b"3\r\nab", b"c\r\n2\r\nde\r\n0\r\n\r\n") == (200, b"abcde")


async def test_a_refusal_has_its_status_and_body():
    assert await _read(b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy") == (503, b"busy")


async def test_a_connection_lost_in_the_middle_is_an_error():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab"
    with pytest.raises(Unavailable, match="closed the connection"):
        await _read(head, lost=True)


async def test_what_is_not_http_is_an_error():
    with pytest.raises(Unavailable, match="not HTTP"):
        await _read(b"220 mail.example.org\r\n")


async def test_a_response_without_a_length_ends_with_its_connection():
    assert await _read(b"HTTP/1.0 200 OK\r\n\r\nab", b"cd", lost=True) == (200, b"abcd")


async def test_a_connection_lost_before_the_head_is_an_error():
    with pytest.raises(Unavailable, match="closed the connection"):
        await _read(b"HTTP/1.0 200 OK\r\n", lost=True)
