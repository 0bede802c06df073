"""HTTP/1.1 as it comes from sockets: what is malformed, oversized or slow, and what offers more."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from core.listen import HttpServer, bind
from gateway import http_protocol
from gateway.http_gate import RequestGate
from gateway.http_protocol import BoundedHttpProtocol

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = (
    b"POST /read HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def read(request):
    try:
        body = await request.body()
    except ClientDisconnect:
        return PlainTextResponse("nobody is there")
    return PlainTextResponse(f"{request.method} read {body.decode()}.")


async def leave_unread(request):
    return PlainTextResponse("not read.")


@asynccontextmanager
async def listening():
    app = Starlette(
        routes=[
            Route("/read", read, methods=["GET", "POST"]),
            Route("/last", read),
            Route("/unread", leave_unread, methods=["POST"]),
        ]
    )
    app.add_middleware(RequestGate)
    server = HttpServer(
        uvicorn.Config(app, http=BoundedHttpProtocol, ws="none", lifespan="off", log_config=None)
    )
    listener = bind("127.0.0.1", 0, "test")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def talk(*parts):
    """Sends the parts, each once the server has had its turn, and reads until it closes."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()


def refusal(reply):
    """Status and error of a reply that is one refusal, and nothing else."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close" in head.lower() and b"\r\nx-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return int(head.split()[1]), error["code"]


def post(body=b"hello", extra=OFFER):
    head = b"POST /read HTTP/1.1\r\nhost: x\r\n" + extra
    return head + b"content-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("cut", [0, 30, -7, -5, -2])
async def test_an_offer_of_another_protocol_is_answered_in_this_one(cut):
    request = post() + LAST
    at = len(post()) + cut if cut <= 0 else cut
    reply = await talk(request[:at], request[at:])
    assert reply.count(b"HTTP/1.1 200 ") == 2
    assert b"POST read hello." in reply and reply.endswith(b"GET read .")


@pytest.mark.parametrize(
    "request_, answer",
    [
        (
            b"POST /read HTTP/1.1\r\nhost: x\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\n"
            b"5\r\nhello\r\n0\r\n\r\n" + LAST,
            b"POST read hello.",
        ),
        (
            b"GET /read HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-key: x\r\n\r\n" + LAST,
            b"GET read .",
        ),
        (post() + post(b"again") + LAST, b"POST read again."),
        (post(extra=b"connection: close, upgrade\r\nupgrade: h2c\r\n"), b"POST read hello."),
    ],
)
async def test_offers_of_every_kind_lose_nothing(request_, answer):
    reply = await talk(request_)
    assert answer in reply and b"HTTP/1.1 4" not in reply


@pytest.mark.parametrize(
    "body",
    [
        b"ZZ\r\n",
        b"5\r\nhello\r\nZZ\r\n",
        b"-1\r\n",
        b"5\r\nhelloX",
        b"FFFFFFFFFFFFFFFFFF\r\n",
        b"5\r\nhello\r\n0\r\nno header\r\n\r\n",
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_malformed_chunked_body_is_a_400(body, at_once):
    reply = await talk(*([CHUNKED + body] if at_once else [CHUNKED, body]))
    assert refusal(reply) == (400, "invalid_request")
    assert b"x-request-id: mine" in reply


async def test_a_malformed_request_never_answers_for_an_earlier_one():
    """Of three requests the last is malformed: the others get their answers, or none."""
    reply = await talk(post(extra=b"") + post(extra=b"") + CHUNKED + b"ZZ\r\n")
    assert b"HTTP/1.1 4" not in reply


@pytest.mark.parametrize(
    "head, status",
    [
        (b"CONNECT a.example:443 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n", 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: b\x00\r\n\r\n", 400),
    ],
)
async def test_heads_that_no_server_should_take_are_refused(head, status):
    assert refusal(await talk(head))[0] == status


async def test_as_many_headers_as_are_allowed_are_taken():
    head = b"GET /last HTTP/1.1\r\nconnection: close\r\n" + b"a: b\r\n" * 127 + b"\r\n"
    assert (await talk(head)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("what", [b"0\r\nx: %s\r\n\r\n", b"5;%s\r\nhello\r\n0\r\n\r\n"])
async def test_what_surrounds_a_body_is_bounded_as_well(what):
    reply = await talk(CHUNKED + what % (b"y" * 3_000_000))
    assert refusal(reply) == (400, "invalid_request")


async def test_a_body_in_the_smallest_chunks_is_a_body():
    body = b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n"
    reply = await talk(CHUNKED + body + LAST)
    assert b"POST read xxx" in reply and b"HTTP/1.1 4" not in reply


async def test_a_body_that_does_not_come_is_timed_out(monkeypatch):
    monkeypatch.setattr(http_protocol, "_BODY_TIMEOUT_S", 0.1)
    assert refusal(await talk(CHUNKED + b"5\r\nhel")) == (408, "request_timeout")


async def test_a_body_that_nobody_reads_holds_no_connection(monkeypatch):
    """The answer was given; the rest may not trickle in for ever."""
    monkeypatch.setattr(http_protocol, "_BODY_TIMEOUT_S", 0.1)
    reply = await talk(CHUNKED.replace(b"/read", b"/unread") + b"5\r\nhel")
    assert reply.count(b"HTTP/1.1 ") == 1 and reply.endswith(b"not read.")
