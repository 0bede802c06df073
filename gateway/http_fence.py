"""The last line: a fault of this software is a plain 500, and its text stays inside."""

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import to_failure
from gateway.http_errors import error_response


class Fence:
    """ASGI middleware. Logs the kind of what escaped, never its words."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started |= message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as error:
            structlog.get_logger().error("unhandled_error", reason=to_failure(error).message)
            if scope["type"] == "http" and not started:
                await error_response(error)(scope, receive, send)
