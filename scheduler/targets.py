"""Who is to be scraped, as Prometheus asks for it: HTTP service discovery.

Source of the format: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from dataclasses import dataclass
from typing import Any

from core.process import SCHEDULER_NAME
from scheduler.front_desk import FrontDesk


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """A process with an admin server, at host:port."""

    process: str
    role: str
    address: str


def scrape_targets(
    desk: FrontDesk, own_address: str, own_name: str = SCHEDULER_NAME
) -> list[ScrapeTarget]:
    """Every process that is known now. One that was lost is gone from the list, too.

    A scheduler that stands by knows itself alone, and the leader does not know it.
    """
    found = [ScrapeTarget(process=own_name, role="scheduler", address=own_address)]
    for gateway, address in desk.gateway_admins.items():
        name = gateway.partition("/")[0]
        found.append(ScrapeTarget(process=name, role="gateway", address=address))
    for member in desk.members.values():
        hello = member.hello
        name, role = hello.endpoint.worker.name, hello.role.name.lower()
        found.append(ScrapeTarget(process=name, role=role, address=hello.admin_address))
    return sorted((each for each in found if each.address), key=lambda each: each.process)


def as_http_sd(targets: list[ScrapeTarget]) -> list[dict[str, Any]]:
    """The answer that Prometheus reads: each target with its labels."""
    return [
        {
            "targets": [target.address],
            "labels": {"process": target.process, "role": target.role},
        }
        for target in targets
    ]
