"""A cluster's admin servers, as operators ask them: first the scheduler's, then the gateways'."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx

from core.errors import InvalidRequest, RequestNotFound, Unavailable

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the admin servers say at one time. `latencies` is by gateway, without silent ones."""

    cluster: Mapping[str, Any]
    latencies: Mapping[str, Mapping[str, Any]]


class OperatorClient:
    """Owns its connections. Its methods raise TandemError with one line for a person."""

    def __init__(
        self, admin_url: str, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`admin_url` is the scheduler's admin server; it knows the others."""
        self._url = admin_url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise InvalidRequest(f"{admin_url} is not a URL", field="--admin-url")
        # Proxies of the environment are not asked: the servers are at the given addresses.
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, transport=transport, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def cluster(self) -> dict[str, Any]:
        """/cluster of the scheduler that leads, whom one that stands by names."""
        told = await self._cluster_at(self._url)
        leader = told.get("leader", {})
        if not leader.get("leads", True) and (there := leader.get("admin_address")):
            return await self._cluster_at(f"http://{there}")
        return told

    async def _cluster_at(self, url: str) -> dict[str, Any]:
        told = await self._get(f"{url}/cluster")
        if "workers" not in told:
            raise Unavailable(f"{url} is no admin server of a scheduler")
        return told

    async def snapshot(self) -> Snapshot:
        """The cluster, and how fast its gateways have been of late."""
        cluster = await self.cluster()
        gateways = _gateways(cluster)
        answers = await asyncio.gather(
            *(self._get(f"http://{address}/latency") for address in gateways.values()),
            return_exceptions=True,
        )
        latencies = {
            name: answer
            for name, answer in zip(gateways, answers, strict=True)
            if isinstance(answer, dict)
        }
        return Snapshot(cluster=cluster, latencies=latencies)

    async def request(self, wanted: str) -> list[dict[str, Any]]:
        """What the gateways know of a request. Raises RequestNotFound where that is nothing."""
        found: list[dict[str, Any]] = []
        for address in _gateways(await self.cluster()).values():
            response = await self._ask(f"http://{address}/requests/{quote(wanted, safe='')}")
            if response.status_code == httpx.codes.NOT_FOUND:
                continue
            found += _json(response)["requests"]
        if not found:
            raise RequestNotFound(f"no gateway remembers a request with the id {wanted}")
        return found

    async def recent(self, search: str, limit: int) -> list[dict[str, Any]]:
        """The latest requests of all gateways that match, the latest first."""
        found: list[dict[str, Any]] = []
        for address in _gateways(await self.cluster()).values():
            asked = {"search": search, "limit": str(limit)}
            response = await self._ask(f"http://{address}/requests", asked)
            found += _json(response)["requests"]
        return sorted(found, key=lambda told: -told["began_at"])[:limit]

    async def _get(self, url: str) -> dict[str, Any]:
        return _json(await self._ask(url))

    async def _ask(self, url: str, params: Mapping[str, str] | None = None) -> httpx.Response:
        try:
            return await self._http.get(url, params=params)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(
                f"no admin server at {url}: start a cluster with `tandem serve`, or say with "
                "--admin-url where its scheduler's is (`tandem serve` prints it)"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"{url} failed: {error or type(error).__name__}") from error


def _gateways(cluster: Mapping[str, Any]) -> dict[str, str]:
    """Their names and addresses."""
    return {
        target["process"]: target["address"]
        for target in cluster["scrape_targets"]
        if target["role"] == "gateway"
    }


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        told = response.json()
        if response.is_error:
            raise Unavailable(str(told["error"]))
    except (ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{response.url} does not answer like an admin server") from error
    if not isinstance(told, dict):
        raise Unavailable(f"{response.url} does not answer like an admin server")
    return told
