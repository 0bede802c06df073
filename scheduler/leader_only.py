"""What only the scheduler that leads can answer. One that stands by says who leads, and where."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from scheduler.election import Election


def elsewhere(election: Election | None, request: Request) -> Response | None:
    """The answer of a scheduler that stands by; None where it leads.

    307 to the same page of the leader's admin server, 503 where nobody is known to lead.
    """
    if election is None or election.leads:
        return None
    if (lease := election.leader) is None:
        unknown = {
            "code": "unavailable",
            "message": "this scheduler stands by, and knows of none that leads",
            "leader": None,
        }
        return JSONResponse({"error": unknown}, 503, headers={"retry-after": "1"})
    holder, address = lease.leader.holder, lease.leader.admin_address
    told: dict[str, Any] = {
        "code": "stands_by",
        "message": f"this scheduler stands by; {holder} leads, its admin server is {address}",
        "leader": {"scheduler": holder, "admin_address": address},
    }
    there = request.url.replace(scheme="http", netloc=address)
    return JSONResponse({"error": told}, 307, headers={"location": str(there)})
