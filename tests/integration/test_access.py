"""Who may call the two public servers, and how much: on real sockets, over a scripted cluster."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import openai
import pytest
import structlog
import trustme
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from core.api_keys import KeyEntry, entry_toml, hash_of
from core.config import ClusterConfig, GatewayConfig
from core.errors import ConfigError, Overloaded
from core.messages import StopReason
from engine.prepare import prepare
from gateway.api import InferenceApi
from gateway.auth import authenticator_of
from gateway.backend import TokenBatch
from gateway.grpc_gate import GrpcGate
from gateway.grpc_service import InferenceService
from gateway.http_app import create_app
from gateway.servers import serve
from gateway.tokenizer import PromptTokenizer
from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1 import inference_pb2_grpc

KEY, OTHER = "tdm-one", "tdm-other"
# A prompt of as many tokens as it has ids.
BODY = {"model": "demo", "prompt": [5] * 10}
HEALTH = health_pb2.HealthCheckRequest()


class Scripted:
    """Answers everything with three tokens, or with the refusal that it is given."""

    def __init__(self) -> None:
        self.jobs = []
        self.refusal = None
        self.hold = asyncio.Event()
        self.hold.set()

    @asynccontextmanager
    async def open(self, job):
        self.jobs.append(job)
        if self.refusal is not None:
            raise self.refusal
        yield self

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        yield TokenBatch(token_ids=(100, 101))
        await self.hold.wait()
        yield TokenBatch(token_ids=(2,), stop_reason=StopReason.EOS)

    def stop(self, reason, choice=None):
        pass


@pytest.fixture(scope="module")
def card():
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(card):
    return PromptTokenizer(card)


@pytest.fixture
def backend():
    return Scripted()


class Served:
    """The addresses and clients of two running servers."""

    def __init__(self, serving, authenticator, scheme):
        self.tls = serving.tls
        self.url = f"{scheme}://127.0.0.1:{serving.http_port}"
        self.target = f"127.0.0.1:{serving.grpc_port}"
        self.authenticator = authenticator

    def http(self, key=None, **options):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=10, trust_env=False, **options
        )

    async def complete(self, key=None, **options):
        async with self.http(key) as client:
            return await client.post("/v1/completions", json=BODY, **options)

    @asynccontextmanager
    async def stub(self, kind=inference_pb2_grpc.InferenceServiceStub):
        async with grpc.aio.insecure_channel(self.target) as channel:
            yield kind(channel)


@pytest.fixture
def start(card, tokenizer, backend):
    """Both servers with these gateway settings."""

    @asynccontextmanager
    async def run(**settings):
        gateway = GatewayConfig(**{"http_port": 0, "grpc_port": 0} | settings)
        config = ClusterConfig(gateway=gateway)
        api = InferenceApi.of_one(card, "demo", config, backend, tokenizer=tokenizer)
        authenticator = authenticator_of(gateway)
        app = create_app(api, readiness=lambda: (True, ""), authenticator=authenticator)
        gate = GrpcGate(authenticator)
        try:
            async with serve(
                gateway, app, [InferenceService(api)], drain_timeout_s=2.0, interceptors=[gate]
            ) as serving:
                yield Served(serving, authenticator, "https" if gateway.tls_cert_file else "http")
        finally:
            api.close()

    return run


@pytest.fixture
def keys(tmp_path):
    """Writes a file of keys: tenants, and what each key's entry says beside its id."""

    def write(tenants="", **entries):
        path = tmp_path / "keys.toml"
        text = tenants
        for id, fields in entries.items():
            made = {"id": id, "hash": hash_of(f"tdm-{id}"), "tenant": "acme"} | fields
            text += entry_toml(KeyEntry(**made))
        path.write_text(text)
        return str(path)

    return write


def metadata(key):
    return (("authorization", f"Bearer {key}"),)


def generate(**fields):
    return pb.GenerateRequest(model="demo", token_ids=pb.TokenIds(ids=[5] * 10), **fields)


def details(error):
    found = {}
    for packed in rpc_status.from_call(error).details:
        kind = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[1])
        found[kind.__name__] = kind.FromString(packed.value)
    return found


async def grpc_refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/demo"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/openapi.json"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("GET", "/no/such/route"),
    ("DELETE", "/v1/models"),
    ("GET", "/healthz/"),
    ("GET", "//healthz"),
]


async def test_nothing_but_health_is_answered_without_a_key(start, keys, backend):
    async with start(api_keys_file=keys(one={})) as served, served.http() as client:
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200
        for method, path in ROUTES:
            for headers in ({}, {"authorization": "Bearer tdm-wrong"}, {"api-key": "tdm-wrong"}):
                reply = await client.request(method, path, json=BODY, headers=headers)
                assert reply.status_code == 401, path
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.json()["error"]["code"] == "invalid_api_key"
                assert reply.json()["error"]["type"] == "invalid_request_error"
    assert not backend.jobs


async def test_nothing_but_health_is_answered_without_a_key_over_grpc(start, keys, backend):
    async with start(api_keys_file=keys(one={})) as served:
        async with served.stub(health_pb2_grpc.HealthStub) as health:
            await health.Check(HEALTH, timeout=10)
        async with served.stub() as stub:
            for sent in ((), metadata("tdm-wrong"), (("authorization", KEY),)):
                error = await grpc_refusal(stub.Generate(generate(), metadata=sent, timeout=10))
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert details(error)["ErrorInfo"].reason == "INVALID_API_KEY"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ListModels(pb.ListModelsRequest(), metadata=sent, timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with served.stub(reflection_pb2_grpc.ServerReflectionStub) as stub:
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            error = await grpc_refusal(stub.ServerReflectionInfo(iter([asked]), timeout=10))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        async with grpc.aio.insecure_channel(served.target) as channel:
            unknown = channel.unary_unary("/no.such/Method")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not backend.jobs


async def test_a_key_opens_both_servers_in_either_style(start, keys, backend):
    async with start(api_keys_file=keys(one={})) as served:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            await client.completions.create(**BODY)
        async with served.http() as client:
            azure = await client.post("/v1/completions", json=BODY, headers={"api-key": KEY})
            assert azure.status_code == 200
        async with served.stub() as stub:
            for sent in (metadata(KEY), (("api-key", KEY),)):
                events = [each async for each in stub.Generate(generate(), metadata=sent)]
                assert events[-1].finished.usage.completion_tokens == 3
    assert [job.cache_salt for job in backend.jobs] == ["acme"] * 4


async def test_a_header_that_stands_twice_opens_nothing(start, keys):
    async with start(api_keys_file=keys(one={})) as served, served.http() as client:
        twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401


async def test_tenants_have_prefix_caches_of_their_own(start, keys, backend):
    async with start(api_keys_file=keys(one={}, other={"tenant": "umbrella"})) as served:
        for key in (KEY, OTHER):
            assert (await served.complete(key)).status_code == 200
    assert [job.cache_salt for job in backend.jobs] == ["acme", "umbrella"]


async def test_without_keys_everybody_shares_one_cache_whatever_they_send(start, backend):
    async with start() as served:
        for key in (None, KEY):
            assert (await served.complete(key)).status_code == 200
    assert [job.cache_salt for job in backend.jobs] == ["", ""]


async def test_a_model_that_a_key_is_not_for_does_not_exist_for_it(start, keys, backend):
    async with start(api_keys_file=keys(one={"models": ("another",)})) as served:
        async with served.http(KEY) as client:
            assert (await client.get("/v1/models")).json()["data"] == []
            for reply in (
                await client.get("/v1/models/demo"),
                await client.post("/v1/completions", json=BODY),
                await client.post("/tokenize", json={"model": "demo", "prompt": "x"}),
            ):
                assert reply.status_code == 404
                assert reply.json()["error"]["code"] == "model_not_found"
                assert "demo" not in reply.text
        async with served.stub() as stub:
            error = await grpc_refusal(stub.Generate(generate(), metadata=metadata(KEY)))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            listed = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata(KEY))
            assert not listed.models
    assert not backend.jobs


async def test_keys_change_without_a_restart(start, keys):
    async with start(api_keys_file=keys(one={})) as served:
        assert (await served.complete(OTHER)).status_code == 401
        keys(other={}, third={})
        served.authenticator.refresh()
        assert (await served.complete(OTHER)).status_code == 200
        assert (await served.complete(KEY)).status_code == 401


async def test_requests_above_the_quota_are_429_and_say_when_to_come_back(start, keys, backend):
    async with start(api_keys_file=keys(one={"requests_per_minute": 2}, other={})) as served:
        first, second, third = [await served.complete(KEY) for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert second.headers["x-ratelimit-reset-requests"] in ("1m0s", "59s", "60s")
        assert 1 <= int(third.headers["retry-after"]) <= 30
        error = third.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
        free = await served.complete(OTHER)
        assert free.status_code == 200 and "x-ratelimit-limit-requests" not in free.headers
        async with served.stub() as stub:
            error = await grpc_refusal(stub.Generate(generate(), metadata=metadata(KEY)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (violation,) = details(error)["QuotaFailure"].violations
        assert violation.subject == "key one"
        assert 0 < details(error)["RetryInfo"].retry_delay.seconds <= 30
    assert len(backend.jobs) == 3


async def test_prompts_are_paid_at_once_and_answers_as_they_come(start, keys):
    """13 tokens a request: of 20 the first leaves 7, which the second does not fit in."""
    async with start(api_keys_file=keys(one={"tokens_per_minute": 20})) as served:
        first, second = await served.complete(KEY), await served.complete(KEY)
        assert first.headers["x-ratelimit-remaining-tokens"] == "10"
        assert second.status_code == 429
        assert second.json()["error"]["type"] == "tokens"
        assert 8 <= int(second.headers["retry-after"]) <= 9  # 3 tokens at 20 a minute
        large = {"model": "demo", "prompt": [5] * 21}
        async with served.http(KEY) as client:
            never = await client.post("/v1/completions", json=large)
        assert never.status_code == 429
        assert "retry-after" not in never.headers and never.headers["x-should-retry"] == "false"


async def test_a_tenants_keys_share_what_the_tenant_has(start, keys):
    tenants = "[tenants.acme]\ntokens_per_minute = 25\n"
    async with start(api_keys_file=keys(tenants, one={}, other={})) as served:
        for key in (KEY, OTHER):
            assert (await served.complete(key)).status_code == 200
        for key in (KEY, OTHER):
            refused = await served.complete(key)
            assert refused.status_code == 429
            assert refused.json()["error"]["message"].startswith("tenant acme may use 25 tokens")


async def test_what_the_cluster_does_not_serve_is_not_paid_for(start, keys, backend):
    async with start(api_keys_file=keys(one={"tokens_per_minute": 20})) as served:
        backend.refusal = Overloaded("full", retry_after_s=7)
        for _ in range(5):
            full = await served.complete(KEY)
            assert (full.status_code, full.headers["retry-after"]) == (503, "7")
        backend.refusal = None
        assert (await served.complete(KEY)).status_code == 200


async def test_request_ids_are_echoed_on_every_answer(start, keys):
    async with start(api_keys_file=keys(one={})) as served, served.http(KEY) as client:
        for method, path in [*ROUTES, ("GET", "/healthz")]:
            reply = await client.request(
                method, path, json=BODY, headers={"x-request-id": "id 1"}, follow_redirects=False
            )
            assert reply.headers.get_list("x-request-id") == ["id 1"], path
        fresh = [await client.get("/healthz") for _ in range(2)]
        assert len({reply.headers["x-request-id"] for reply in fresh}) == 2
        bad = await client.get("/healthz", headers={"x-request-id": "x" * 129})
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "X-Request-Id"
        assert bad.headers["x-request-id"].startswith("req-")


async def test_request_ids_are_echoed_over_grpc(start, keys):
    async with start(api_keys_file=keys(one={})) as served, served.stub() as stub:
        mine = ("x-request-id", "id 1")
        call = stub.Generate(generate(), metadata=(*metadata(KEY), mine), timeout=10)
        assert [event async for event in call]
        assert mine in list(await call.trailing_metadata())
        error = await grpc_refusal(stub.Generate(generate(), metadata=(mine,), timeout=10))
        assert mine in list(error.trailing_metadata())
        assert details(error)["RequestInfo"].request_id == "id 1"
        error = await grpc_refusal(stub.Generate(generate(), metadata=(("x-request-id", "é"),)))
        assert error.code() is not grpc.StatusCode.OK


async def test_each_request_is_one_line_that_quotes_nothing(start, keys, backend):
    with structlog.testing.capture_logs() as logs:
        async with start(api_keys_file=keys(one={"tokens_per_minute": 30})) as served:
            async with served.http(KEY) as client:
                text = {"model": "demo", "prompt": "CANARY CANARY"}
                await client.post("/v1/completions?q=CANARY", json=text)
                await client.get("/healthz")
            async with served.http() as client:
                await client.get("/no%0Aforged", headers={"x-request-id": "mine"})
            async with served.stub() as stub:
                call = stub.Generate(generate(), metadata=metadata(KEY), timeout=10)
                assert [event async for event in call]
    assert KEY not in str(logs) and "Bearer" not in str(logs)
    answered, checked, refused, called = [line for line in logs if line["event"] == "request"]
    assert "CANARY" not in str(answered)
    assert (answered["method"], answered["path"]) == ("POST", "/v1/completions")
    assert (answered["status"], answered["key"], answered["tenant"]) == (200, "one", "acme")
    assert (answered["model"], answered["completion_tokens"]) == ("demo", 3)
    assert answered["prompt_tokens"] > 2
    assert 0 < answered["ttft_s"] <= answered["duration_s"] < 10
    assert answered["job"] == backend.jobs[0].request_id
    assert (checked["path"], checked["log_level"]) == ("/healthz", "debug")
    assert (refused["status"], refused["request_id"]) == (401, "mine")
    assert refused["path"] == "/no\\nforged" and "tenant" not in refused
    assert (called["method"], called["status"]) == ("gRPC", "OK")
    assert called["path"] == "/tandem.v1.InferenceService/Generate"
    assert (called["prompt_tokens"], called["completion_tokens"]) == (10, 3)


async def test_a_client_that_leaves_is_told_in_the_log(start, backend):
    backend.hold.clear()
    with structlog.testing.capture_logs() as logs:
        async with start() as served:
            async with served.stub() as stub:
                call = stub.Generate(generate(), timeout=10)
                await call.read()
                call.cancel()
            async with served.stub() as stub:
                late = await grpc_refusal(stub.Generate(generate(), timeout=0.3))
                assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            async with served.http() as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=BODY, timeout=0.3)
    lines = [line for line in logs if line["event"] == "request"]
    assert [line["status"] for line in lines] == ["CANCELLED", "DEADLINE_EXCEEDED", 499]
    # A client's own deadline is nothing that an operator has to mend.
    assert not [line for line in logs if line["log_level"] == "error"]


async def test_web_pages_of_other_origins_are_let_in_only_where_they_are_named(start, keys):
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = "access-control-allow-origin"
    async with start(api_keys_file=keys(one={})) as served, served.http() as client:
        reply = await client.options("/v1/completions", headers=preflight)
        assert reply.status_code == 401 and allowed not in reply.headers
    origins = ("https://app.example",)
    async with start(api_keys_file=keys(one={}), cors_origins=origins) as served:
        async with served.http() as client:
            reply = await client.options("/v1/completions", headers=preflight)
            assert reply.status_code == 200
            assert reply.headers[allowed] == "https://app.example"
            assert "authorization" in reply.headers["access-control-allow-headers"].lower()
            origin = {"origin": "https://app.example"}
            # The page gets to read why it was refused.
            assert (await client.get("/v1/models", headers=origin)).headers[allowed]
            other = {**preflight, "origin": "https://evil.example"}
            reply = await client.options("/v1/completions", headers=other)
            assert allowed not in reply.headers
        answered = await served.complete(KEY, headers=origin)
        assert answered.status_code == 200 and answered.headers[allowed] == "https://app.example"
        assert "x-request-id" in answered.headers["access-control-expose-headers"].lower()


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """A CA, the server's files, and a client's."""
    folder = tmp_path_factory.mktemp("pki")
    ca, stranger = trustme.CA(), trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("client@example.com")
    files = {
        "ca": ca.cert_pem,
        "key": server.private_key_pem,
        "client_key": client.private_key_pem,
        "stranger": stranger.issue_cert("client@example.com").private_key_and_cert_chain_pem,
    }
    for name, blob in files.items():
        blob.write_to_path(folder / name)
    for name, cert in (("cert", server), ("client_cert", client)):
        for blob in cert.cert_chain_pems:
            blob.write_to_path(folder / name, append=True)
    return folder


def tls_of(pki, **files):
    return {f"tls_{name}_file": str(pki / file) for name, file in files.items()}


def trusting(pki, cert=None):
    context = ssl.create_default_context(cafile=pki / "ca")
    if cert:
        context.load_cert_chain(*cert)
    return context


async def test_both_servers_speak_tls_and_nothing_else(start, pki):
    async with start(**tls_of(pki, cert="cert", key="key")) as served:
        assert served.url.startswith("https://")
        async with served.http(verify=trusting(pki)) as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        async with served.http(verify=ssl.create_default_context()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/healthz")
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(served.url.replace("https", "http") + "/healthz")
        trusted = grpc.ssl_channel_credentials((pki / "ca").read_bytes())
        async with grpc.aio.secure_channel(served.target, trusted) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert [event async for event in stub.Generate(generate(), timeout=10)]
        async with served.stub() as stub:
            error = await grpc_refusal(stub.Generate(generate(), timeout=10))
            assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_malformed_http_is_answered_over_tls_too(start, pki):
    async with start(**tls_of(pki, cert="cert", key="key")) as served:
        port = int(served.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(pki))
        writer.write(b"NOT HTTP\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_with_a_client_ca_only_its_clients_get_a_connection(start, pki):
    files = tls_of(pki, cert="cert", key="key", client_ca="ca")
    async with start(**files) as served:
        known = (pki / "client_cert", pki / "client_key")
        async with served.http(verify=trusting(pki, known)) as client:
            assert (await client.get("/v1/models")).status_code == 200
        for cert in (None, (pki / "stranger",)):
            async with served.http(verify=trusting(pki, cert)) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get("/healthz")
        root = (pki / "ca").read_bytes()
        shown = grpc.ssl_channel_credentials(root, *(path.read_bytes() for path in known[::-1]))
        async with grpc.aio.secure_channel(served.target, shown) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10)
        hidden = grpc.ssl_channel_credentials(root)
        async with grpc.aio.secure_channel(served.target, hidden) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(HEALTH, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "files, words",
    [
        ({"cert": "nowhere", "key": "key"}, r"tls_cert_file: cannot read .*nowhere: No such file"),
        ({"cert": "cert", "key": "nowhere"}, r"tls_key_file: cannot read .*nowhere"),
        ({"cert": "cert", "key": "client_key"}, "key values mismatch"),
        ({"cert": "key", "key": "key"}, "no certificate and its unencrypted key"),
        ({"cert": "cert", "key": "key", "client_ca": "key"}, "tls_client_ca_file: .* holds no CA"),
    ],
)
async def test_bad_tls_files_are_one_clear_error_before_anything_starts(start, pki, files, words):
    with pytest.raises(ConfigError, match=words) as caught:
        async with start(**tls_of(pki, **files)):
            raise AssertionError("the servers started")
    assert "\n" not in caught.value.message
