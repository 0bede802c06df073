"""Requests made from /openapi.json, right and wrong ones: none is answered with a fault.

The servers are the gateway's own, on sockets; the cluster behind them is scripted, since what is
asked for here would keep a model busy for hours.
"""

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.messages import StopReason
from engine.prepare import prepare
from gateway.api import InferenceApi
from gateway.backend import Job, TokenBatch
from gateway.http_app import create_app
from gateway.servers import serve

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
SECONDS = 60
EXAMPLES = 150


class Scripted:
    """Implements `gateway.backend.Backend`: says two tokens and ends by length."""

    @asynccontextmanager
    async def open(self, job: Job) -> AsyncIterator["Scripted"]:
        yield self

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        yield TokenBatch(token_ids=(504,))
        yield TokenBatch(token_ids=(2,), stop_reason=StopReason.LENGTH)

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        """There is nothing to stop."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = ClusterConfig(
        served_name="demo", gateway=GatewayConfig(http_port=0, grpc_port=0, strict_fields=True)
    )
    bound: list[int] = []
    up, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        api = InferenceApi.of_one(prepare(config.model), "demo", config, Scripted())
        app = create_app(api, readiness=lambda: (True, ""))
        async with serve(config.gateway, app, [], drain_timeout_s=1.0) as serving:
            bound.append(serving.http_port)
            up.set()
            await over.wait()
        api.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert up.wait(60)
    yield f"http://127.0.0.1:{bound[0]}"
    loop.call_soon_threadsafe(over.set)
    thread.join(30)
    loop.close()


@pytest.mark.timeout(3 * SECONDS)
def test_no_request_is_answered_with_a_fault(programs, url, tmp_path):
    finished = subprocess.run(
        [
            str(programs("schemathesis") / "schemathesis"),
            *("run", f"{url}/openapi.json", "--mode", "all", "--seed", "5"),
            *("--max-examples", str(EXAMPLES), "--max-time", str(SECONDS)),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
            *("--continue-on-failure", "--warnings", "off", "--request-timeout", "30"),
        ],
        capture_output=True,
        text=True,
        timeout=2.5 * SECONDS,
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
