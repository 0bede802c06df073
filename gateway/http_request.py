"""One body to one checked request, with the answer to whatever is wrong with it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from core.config import GatewayConfig
from core.errors import BodyTooLarge, TandemError
from gateway import bookmark
from gateway.http_body import LastWords, read_body
from gateway.http_errors import HttpRefusal, error_response
from gateway.ledger import Ledger
from gateway.request_record import current

# Beyond this, parsing a body would hold the event loop up for milliseconds.
_INLINE_BODY_BYTES = 16 * 1024
_CLIENT_LEFT = 499


class Parsed(Protocol):
    """What a reader makes of a body."""

    @property
    def ignored(self) -> str | None:
        """The unknown fields that were dropped, as a header names them."""
        ...


P = TypeVar("P", bound=Parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Generic[P]):
    """A request that is fit to be answered, the answer's headers, and when it came."""

    body: P
    headers: dict[str, str]
    ledger: Ledger
    # Of a stream that the client takes up again.
    last_event_id: str | None = None


async def read_request(
    request: Request, config: GatewayConfig, read: Callable[[bytes], P]
) -> Asked[P] | Response:
    """Reads and checks the body; a response where there is nothing to be answered."""
    ledger = current().ledger()
    headers = {"x-request-id": current().request_id}
    try:
        raw = await read_body(request, max_bytes=config.max_body_bytes)
        inline = len(raw) <= _INLINE_BODY_BYTES
        body = read(raw) if inline else await asyncio.to_thread(read, raw)
    except ClientDisconnect:
        return Response(status_code=_CLIENT_LEFT)
    except BodyTooLarge as error:
        refusal = error_response(error, headers)
        return LastWords(refusal.body, refusal.status_code, dict(refusal.headers))
    except (TandemError, HttpRefusal) as error:
        return error_response(error, headers)
    if body.ignored:
        headers["x-tandem-ignored-fields"] = body.ignored
    last = request.headers.get(bookmark.HEADER)
    return Asked(body=body, headers=headers, ledger=ledger, last_event_id=last)
