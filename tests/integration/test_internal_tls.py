"""Processes of a cluster that meet over TCP know each other by certificates of the cluster's CA."""

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
import structlog
import trustme

from core import rpc
from core.config import DEFAULT_MODEL, InternalTlsConfig, SchedulerConfig
from core.internal_tls import InternalTls
from core.messages import GatewayHello, WorkerRef
from core.stream import StreamLink
from core.tickets import Tickets
from protos.tandem.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler.desk import SchedulerDesk
from scheduler.front_desk import FrontDesk
from scheduler.leadership import Leadership
from scheduler.service import SchedulerService
from tests.integration.separate import ROLES, SeparateProcesses, answers

SOON_S = 60.0
ME = WorkerRef(name="scheduler", incarnation="1")


def shown(folder: Path, name: str, ca: trustme.CA, host: str = "tandem") -> dict[str, str]:
    """The settings of a process that shows a certificate of this CA, and trusts it alone."""
    made = ca.issue_cert(host)
    files = {f"{kind}_file": folder / f"{name}.{kind}" for kind in ("cert", "key", "ca")}
    made.cert_chain_pems[0].write_to_path(files["cert_file"])
    made.private_key_pem.write_to_path(files["key_file"])
    ca.cert_pem.write_to_path(files["ca_file"])
    return {setting: str(path) for setting, path in files.items()}


def tls(files: dict[str, str]) -> InternalTls:
    return InternalTls(InternalTlsConfig(**files))


class Scheduler:
    """A scheduler's server in this process, with a certificate or without."""

    def __init__(self, shows: InternalTls | None) -> None:
        self._server = rpc.server()
        desk = FrontDesk([SchedulerDesk(SchedulerConfig(), "m", Tickets(b"secret" * 4))])
        service = SchedulerService(desk, ME, Leadership(ME))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, self._server)
        port = (
            self._server.add_insecure_port("127.0.0.1:0")
            if shows is None
            else self._server.add_secure_port("127.0.0.1:0", shows.server)
        )
        self.address = f"127.0.0.1:{port}"

    async def __aenter__(self) -> "Scheduler":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


def link(address: str, dial: rpc.Dial, heard: asyncio.Event) -> StreamLink:
    """A gateway's stream, which tells of the first word that comes back."""
    return StreamLink(
        address,
        lambda channel: scheduler_pb2_grpc.SchedulerServiceStub(channel).Schedule,
        scheduler_pb2.ScheduleRequest,
        hello=lambda: [GatewayHello(gateway=WorkerRef(name="gateway", incarnation="1"))],
        on_message=lambda message: heard.set(),
        on_down=lambda: None,
        dial=dial,
    )


async def is_welcomed(address: str, dial: rpc.Dial) -> bool:
    """Whether the scheduler answers a hello; False where the stream ended without a word."""
    heard = asyncio.Event()
    once = asyncio.create_task(link(address, dial, heard).run_once())
    hearing = asyncio.create_task(heard.wait())
    await asyncio.wait({once, hearing}, timeout=SOON_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (once, hearing):
        task.cancel()
    await asyncio.wait({once, hearing})
    return heard.is_set()


async def test_who_shows_a_certificate_of_the_ca_is_let_in_and_nobody_else(tmp_path):
    ours, theirs = trustme.CA(), trustme.CA()
    of_us = shown(tmp_path, "ours", ours)
    stranger = shown(tmp_path, "theirs", theirs)
    trusting = stranger | {"ca_file": of_us["ca_file"]}
    async with Scheduler(tls(of_us)) as scheduler:
        assert await is_welcomed(scheduler.address, tls(shown(tmp_path, "other", ours)).channel)
        for dial in (rpc.channel, tls(stranger).channel, tls(trusting).channel):
            assert not await is_welcomed(scheduler.address, dial)


async def test_a_server_that_lacks_the_name_or_speaks_no_tls_is_told_nothing(tmp_path):
    ca = trustme.CA()
    dial = tls(shown(tmp_path, "ours", ca)).channel
    async with Scheduler(tls(shown(tmp_path, "named", ca, "tandem-2"))) as misnamed:
        assert not await is_welcomed(misnamed.address, dial)
    async with Scheduler(None) as plain:
        assert not await is_welcomed(plain.address, dial)


async def test_renewed_certificates_serve_the_next_connections_of_both_ends(tmp_path):
    old, new = trustme.CA(), trustme.CA()
    server = tls(shown(tmp_path, "server", old))
    client = tls(shown(tmp_path, "client", old))
    left = tls(shown(tmp_path, "left", old))
    async with Scheduler(server) as scheduler:
        assert await is_welcomed(scheduler.address, client.channel)
        for name in ("server", "client"):
            shown(tmp_path, name, new)
        assert await is_welcomed(scheduler.address, client.channel)
        assert not await is_welcomed(scheduler.address, left.channel)
        (tmp_path / "server.key").write_text("half of it is in place")
        assert await is_welcomed(scheduler.address, client.channel)


@pytest.mark.parametrize(
    ("who", "why"),
    [
        (
            "nobody",
            "it hung up, as who has internal_tls does where no certificate of its CA is shown",
        ),
        ("stranger", "its certificate is not of the CA in internal_tls.ca_file"),
    ],
)
async def test_who_is_not_let_in_says_why_in_one_line(tmp_path, who, why):
    dial = rpc.channel
    if who == "stranger":
        dial = tls(shown(tmp_path, "theirs", trustme.CA())).channel
    async with Scheduler(tls(shown(tmp_path, "ours", trustme.CA()))) as scheduler:
        calls = 0

        def counted(address: str) -> grpc.aio.Channel:
            nonlocal calls
            calls += 1
            if calls == 5:
                enough.set()
            return dial(address)

        enough = asyncio.Event()
        with structlog.testing.capture_logs() as logs:
            trying = asyncio.create_task(
                link(scheduler.address, counted, asyncio.Event()).keep_up()
            )
            async with asyncio.timeout(SOON_S):
                await enough.wait()
            trying.cancel()
            await asyncio.wait({trying})
    assert logs == [
        {
            "event": "not_connected",
            "log_level": "error",
            "address": scheduler.address,
            "why": why,
        }
    ]


@pytest.mark.deploy
@pytest.mark.timeout(900)
def test_a_cluster_with_certificates_serves_and_a_process_without_one_joins_it_not(
    tmp_path, eventually
):
    ca = trustme.CA()
    settings = {"internal_tls": shown(tmp_path, "ours", ca)}
    with SeparateProcesses(tmp_path, settings) as processes:
        for role in ROLES:
            processes.start(role, f"{role}-a")
        eventually(lambda: answers(f"{processes.gateway_url}/readyz"), "it is ready", timeout_s=300)
        body = {
            "model": DEFAULT_MODEL,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        url = f"{processes.gateway_url}/v1/chat/completions"
        asked = httpx.post(url, json=body, timeout=120, trust_env=False).raise_for_status()
        assert "Paris" in asked.json()["choices"][0]["message"]["content"]

        other = {"gateway": {"http_port": 0}}
        stranger = {"internal_tls": shown(tmp_path, "theirs", trustme.CA())}
        del processes.settings["internal_tls"]
        processes.start("gateway", "gateway-bare", other)
        processes.start("gateway", "gateway-other", other | stranger)
        for name, why in (
            ("gateway-bare", "it hung up, as who has internal_tls"),
            ("gateway-other", "is not of the"),
        ):
            eventually(
                lambda name=name: processes.events(name, "not_connected"),
                f"{name} says that it is not let in",
                timeout_s=240,
            )
            (line,) = processes.events(name, "not_connected")
            assert why in line["why"]
        targets = httpx.get(f"{processes.admin_url}/sd", timeout=20, trust_env=False).json()
        known = {each["labels"]["process"] for each in targets}
        assert known == {f"{role}-a" for role in ROLES}
        metrics = {each["labels"]["process"]: each["targets"][0] for each in targets}
        told = httpx.get(f"http://{metrics['decode-a']}/metrics", timeout=20, trust_env=False).text
        assert "tandem_adoptions_total" in told, "KV went from one worker to the other"
