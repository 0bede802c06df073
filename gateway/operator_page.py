"""What the gateway's admin port has for people: a page, and the JSON that it is made of.

The files of `gateway/page` are served as they are. They load nothing from elsewhere, and the
browser is told so.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from core.errors import Unavailable
from gateway.latency_curves import LatencyCurves
from gateway.recent import MIN_PREFIX_CHARS, RecentRequests

_PAGE = Path(__file__).parent / "page"
# Route: file, media type.
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/page/models.js": ("models.js", "text/javascript; charset=utf-8"),
    "/page/views.js": ("views.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_MAX_SEARCH_CHARS = 256
_MAX_LISTED = 200
_LISTED = 50


def page_routes(
    recent: RecentRequests,
    curves: LatencyCurves,
    cluster: Callable[[], Awaitable[dict[str, Any]]],
    *,
    models: Sequence[str],
) -> list[BaseRoute]:
    """GET /, the page's files, /requests, /requests/ID, /latency and /cluster.

    `models` are those that are served; /requests and /latency can be asked for one of them.
    """

    def file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
        content = (_PAGE / name).read_bytes()

        async def answer(request: Request) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return answer

    async def requests(request: Request) -> Response:
        limit = request.query_params.get("limit", str(_LISTED))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_LISTED):
            return _json({"error": f"limit: must be 1 to {_MAX_LISTED}"}, 400)
        text = request.query_params.get("search", "")
        if len(text) > _MAX_SEARCH_CHARS:
            return _json({"error": f"search: at most {_MAX_SEARCH_CHARS} characters"}, 400)
        model = request.query_params.get("model")
        if model not in (None, *models):
            return _unknown(models)
        found = recent.search(text, int(limit), model)
        return _json({"requests": found, "kept": len(recent), "models": models})

    async def one(request: Request) -> Response:
        wanted = request.path_params["id"]
        found = recent.find(wanted)
        if not found:
            why = (
                "no recent request has that id: give a request id, a job or a trace id, "
                f"or at least its first {MIN_PREFIX_CHARS} characters"
            )
            return _json({"error": why}, 404)
        return _json({"requests": found})

    async def latency(request: Request) -> Response:
        model = request.query_params.get("model")
        return _json(curves.told(model)) if model in (None, *models) else _unknown(models)

    async def whole(request: Request) -> Response:
        try:
            return _json(await cluster())
        except Unavailable as error:
            return _json({"error": error.message}, 503)

    return [
        *(Route(path, file(name, kind)) for path, (name, kind) in _FILES.items()),
        Route("/requests", requests),
        Route("/requests/{id:path}", one),
        Route("/latency", latency),
        Route("/cluster", whole),
    ]


def _unknown(models: Sequence[str]) -> Response:
    return _json({"error": f"model: must be one of {', '.join(models)}"}, 400)


def _json(content: dict[str, Any], status: int = 200) -> JSONResponse:
    return JSONResponse(content, status, headers=_HEADERS)
