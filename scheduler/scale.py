"""Who serves which role, shown and chosen: GET and POST /scale on the admin port.

Where there are several models, the query says which: /scale?model=NAME. `tandem scale` is its
client. The body of a POST is `{"prefill": 2, "decode": 2}`, or `{"auto": true}`, which gives the
choice back to the demand.
"""

import json
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from core.errors import InvalidRequest, to_failure
from scheduler.desk import SchedulerDesk
from scheduler.elastic import Split
from scheduler.election import Election
from scheduler.front_desk import FrontDesk
from scheduler.leader_only import elsewhere

_JSON = "application/json"
_MAX_BODY_BYTES = 1024


def scale_routes(front: FrontDesk, election: Election | None = None) -> list[BaseRoute]:
    """GET /scale tells; POST /scale chooses, and tells. An error names its field.

    A scheduler that stands by knows no workers, and sends who asks to the one that leads.
    """

    async def tell(request: Request) -> Response:
        if (answer := elsewhere(election, request)) is not None:
            return answer
        try:
            return JSONResponse(described(_desk_of(front, request)))
        except InvalidRequest as error:
            return _refusal(error)

    async def choose(request: Request) -> Response:
        if (answer := elsewhere(election, request)) is not None:
            return answer
        # A web page cannot ask for this type without asking the server first, which says no.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return JSONResponse({"error": {"message": f"content-type must be {_JSON}"}}, 415)
        try:
            desk = _desk_of(front, request)
            desk.choose_split(_split(await _body(request)))
        except InvalidRequest as error:
            return _refusal(error)
        return JSONResponse(described(desk))

    return [Route("/scale", tell), Route("/scale", choose, methods=["POST"])]


def described(desk: SchedulerDesk) -> dict[str, Any]:
    """What there is, what is wished for, and why."""
    state = desk.roles.state()
    wishes = state.wishes
    return {
        "elastic": state.elastic,
        "override": asdict(state.override) if state.override is not None else None,
        "now": asdict(state.now),
        "target": asdict(wishes.target) if wishes.target is not None else None,
        "wanted": asdict(wishes.wanted),
        "load": asdict(state.loads) if state.loads is not None else None,
        "workers": [
            {
                "worker": key,
                "role": (member.told or member.hello.role).name.lower(),
                "turning": key in state.turning,
                "draining": member.load is not None and member.load.draining,
                "elastic": member.hello.elastic,
                "num_placed": member.num_seqs,
            }
            for key, member in sorted(desk.cluster.members.items())
        ],
    }


def _desk_of(front: FrontDesk, request: Request) -> SchedulerDesk:
    name = request.query_params.get("model")
    if name is None and len(front.desks) == 1:
        return next(iter(front.desks.values()))
    if name is None or name not in front.desks:
        raise InvalidRequest(f"must be one of {', '.join(front.desks)}", field="model")
    return front.desks[name]


def _refusal(error: InvalidRequest) -> Response:
    told = {"code": to_failure(error).code, "message": error.message, "field": error.field}
    return JSONResponse({"error": told}, 400)


async def _body(request: Request) -> object:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequest(f"the body is longer than {_MAX_BODY_BYTES} bytes")
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON") from error
    return found


def _split(body: object) -> Split | None:
    """What is chosen; None: the demand chooses. Raises InvalidRequest."""
    if body == {"auto": True} and isinstance(body, dict) and body["auto"] is True:
        return None
    if not isinstance(body, dict) or set(body) != {"prefill", "decode"}:
        raise InvalidRequest('the body is {"prefill": N, "decode": N} or {"auto": true}')
    for field, number in body.items():
        if type(number) is not int:
            raise InvalidRequest(f"{field}: an integer is needed", field=field)
    return Split(prefill=body["prefill"], decode=body["decode"])
