"""Certificates of servers and clients: renewed while they serve, and who is who by them."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import structlog
import trustme
from grpc_health.v1 import health_pb2_grpc

from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1 import inference_pb2_grpc
from tests.integration.test_access import (
    BODY,
    HEALTH,
    KEY,
    backend,
    card,
    generate,
    keys,
    metadata,
    start,
    tokenizer,
)

__all__ = ["backend", "card", "keys", "start", "tokenizer"]  # fixtures


def issued(folder, name, ca, *identities, **more):
    """Writes a certificate and its key in place of those of that name; gives their paths."""
    made = ca.issue_cert(*identities, **more)
    made.private_key_pem.write_to_path(folder / f"{name}.key")
    for i, blob in enumerate(made.cert_chain_pems):
        blob.write_to_path(folder / f"{name}.crt", append=i > 0)
    return folder / f"{name}.crt", folder / f"{name}.key"


def append(path, text):
    path.write_text(path.read_text() + text)


def grpc_credentials(root, shown):
    cert, key = (path.read_bytes() for path in shown)
    return grpc.ssl_channel_credentials(root.read_bytes(), key, cert)


class TestRenewal:
    """Files that change serve the next connections, and the server never stops for it."""

    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path

    async def peer(self, served, root):
        """Raises where one of the servers shows what this root has not issued."""
        async with served.http(verify=ssl.create_default_context(cafile=root)) as client:
            assert (await client.get("/healthz")).status_code == 200
        credentials = grpc.ssl_channel_credentials(root.read_bytes())
        async with grpc.aio.secure_channel(served.target, credentials) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10)

    async def test_both_servers_show_the_renewed_certificate(self, start, folder):
        old, new = trustme.CA(), trustme.CA()
        old.cert_pem.write_to_path(folder / "old")
        new.cert_pem.write_to_path(folder / "new")
        cert, key = issued(folder, "server", old, "127.0.0.1")
        async with start(tls_cert_file=str(cert), tls_key_file=str(key)) as served:
            await self.peer(served, folder / "old")
            open_ = served.http(verify=ssl.create_default_context(cafile=folder / "old"))
            async with open_ as client:
                await client.get("/healthz")
                issued(folder, "server", new, "127.0.0.1")
                served.tls.refresh()
                assert (await client.get("/healthz")).status_code == 200  # on its connection
            await self.peer(served, folder / "new")
            with pytest.raises(httpx.ConnectError):
                await self.peer(served, folder / "old")

    async def test_files_that_do_not_fit_leave_all_as_it_was(self, start, folder):
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca")
        cert, key = issued(folder, "server", ca, "127.0.0.1")
        good = key.read_bytes()
        async with start(tls_cert_file=str(cert), tls_key_file=str(key)) as served:
            for blob in (b"no key", b""):
                key.write_bytes(blob)
                with structlog.testing.capture_logs() as logs:
                    served.tls.refresh()
                assert [line["event"] for line in logs] == ["certificates_not_read"]
                await self.peer(served, folder / "ca")
            key.write_bytes(good)
            served.tls.refresh()
            await self.peer(served, folder / "ca")

    async def test_a_new_ca_of_clients_lets_its_clients_in_and_the_old_ones_out(
        self, start, folder
    ):
        ca, old, new = trustme.CA(), trustme.CA(), trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca")
        old.cert_pem.write_to_path(folder / "clients")
        cert, key = issued(folder, "server", ca, "127.0.0.1")
        shown = {
            name: issued(folder, name, of, "c@x.example")
            for name, of in (("old", old), ("new", new))
        }
        files = {
            "tls_cert_file": cert,
            "tls_key_file": key,
            "tls_client_ca_file": folder / "clients",
        }

        async def welcome(served, name):
            context = ssl.create_default_context(cafile=folder / "ca")
            context.load_cert_chain(*shown[name])
            answered = 0
            async with served.http(verify=context) as client:
                with contextlib.suppress(httpx.HTTPError):
                    answered += (await client.get("/healthz")).status_code == 200
            credentials = grpc_credentials(folder / "ca", shown[name])
            async with grpc.aio.secure_channel(served.target, credentials) as channel:
                try:
                    await health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10)
                    answered += 1
                except grpc.aio.AioRpcError:
                    pass
            return answered

        async with start(**{name: str(path) for name, path in files.items()}) as served:
            assert [await welcome(served, name) for name in ("old", "new")] == [2, 0]
            new.cert_pem.write_to_path(folder / "clients")
            served.tls.refresh()
            assert [await welcome(served, name) for name in ("old", "new")] == [0, 2]


class TestClientsByCertificate:
    """Who shows a certificate and no key is who the file of keys says; else each name by itself."""

    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca")
        issued(folder, "server", ca, "127.0.0.1")
        issued(folder, "batch", ca, "batch.acme.example")
        issued(folder, "common", ca, common_name="Batch of Acme \u202e")
        issued(folder, "unknown", ca, "nobody@x.example")
        return folder

    def files(self, folder):
        return {
            "tls_cert_file": str(folder / "server.crt"),
            "tls_key_file": str(folder / "server.key"),
            "tls_client_ca_file": str(folder / "ca"),
        }

    async def ask(self, served, folder, name, key=None):
        """The statuses over HTTP and gRPC."""
        shown = (folder / f"{name}.crt", folder / f"{name}.key")
        context = ssl.create_default_context(cafile=folder / "ca")
        context.load_cert_chain(*shown)
        async with served.http(key, verify=context) as client:
            status = (await client.post("/v1/completions", json=BODY)).status_code
        credentials = grpc_credentials(folder / "ca", shown)
        async with grpc.aio.secure_channel(served.target, credentials) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            told = metadata(key) if key else None
            call = stub.Generate(generate(), timeout=10, metadata=told)
            try:
                async for _ in call:
                    pass
                await stub.ListModels(
                    pb.ListModelsRequest(), metadata=metadata(key) if key else None
                )
            except grpc.aio.AioRpcError as error:
                return status, error.code()
        return status, grpc.StatusCode.OK

    async def test_a_certificate_stands_for_the_client_that_the_file_names(
        self, start, folder, keys, backend
    ):
        path = keys(one={"tenant": "other"})
        names = ("batch.acme.example", "Batch of Acme \\u202e")
        listed = "".join(
            f'[[clients]]\nid = "c{i}"\ncertificate = "{name}"\ntenant = "acme"\n'
            for i, name in enumerate(names)
        )
        await asyncio.to_thread(append, Path(path), listed)
        async with start(api_keys_file=path, **self.files(folder)) as served:
            for name in ("batch", "common"):
                assert await self.ask(served, folder, name) == (200, grpc.StatusCode.OK)
            assert {job.cache_salt for job in backend.jobs} == {"acme"}
            backend.jobs.clear()
            assert await self.ask(served, folder, "batch", KEY) == (200, grpc.StatusCode.OK)
            assert {job.cache_salt for job in backend.jobs} == {"other"}
            backend.jobs.clear()
            refused = (401, grpc.StatusCode.UNAUTHENTICATED)
            assert await self.ask(served, folder, "unknown") == refused
            assert await self.ask(served, folder, "batch", "tdm-wrong") == refused
            assert backend.jobs == []

    async def test_without_a_file_each_name_is_a_tenant_of_its_own(self, start, folder, backend):
        async with start(**self.files(folder)) as served:
            for name in ("batch", "unknown", "common"):
                assert await self.ask(served, folder, name) == (200, grpc.StatusCode.OK)
        tenants = [job.cache_salt for job in backend.jobs]
        assert tenants[0:2] == ["batch.acme.example"] * 2
        assert tenants[2] == tenants[3] != tenants[4] == tenants[5]
        assert tenants[2].startswith("cert-") and tenants[4].startswith("cert-")
