"""The real tokenizer and template, a scripted cluster, and HTTP without sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from core.config import ClusterConfig
from core.messages import HandoffTiming, StopReason, TokenLogprobs
from core.model_card import ModelCard
from engine.prepare import prepare
from gateway.api import InferenceApi
from gateway.attempts import Waits
from gateway.backend import Job, TokenBatch
from gateway.http_app import create_app
from gateway.tokenizer import PromptTokenizer

MODEL = "demo-model"
# What a script holds: a batch, an error to raise, or an event to wait for.
Step = TokenBatch | Exception | asyncio.Event


@pytest.fixture(scope="session")
def card() -> ModelCard:
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tokenizer(card: ModelCard) -> PromptTokenizer:
    return PromptTokenizer(card)


class ScriptedBackend:
    """Gives every job the same batches and remembers what it was asked."""

    def __init__(self, tokenizer: PromptTokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos = eos
        self.script: list[Step] = []
        self.refusal: Exception | None = None
        self.jobs: list[Job] = []
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.stops: list[StopReason] = []
        self.stopped_choices: list[int | None] = []

    def say(self, text: str, *, size: int = 1, reason: StopReason = StopReason.EOS) -> None:
        """Scripts a text in batches of `size` tokens; with EOS the last token is the model's."""
        ids = list(self._tokenizer.encode_plain(text))
        self.say_ids([*ids, self.eos] if reason is StopReason.EOS else ids, size, reason)

    def say_ids(self, ids: list[int], size: int, reason: StopReason) -> None:
        cuts = range(0, len(ids), size)
        batches = [TokenBatch(token_ids=tuple(ids[i : i + size])) for i in cuts]
        timing = HandoffTiming(grant_s=0.01, prefill_compute_s=0.02)
        batches[0] = replace(batches[0], waits=Waits(queue_s=0.5), timing=timing, cached_tokens=3)
        batches[-1] = replace(batches[-1], stop_reason=reason)
        self.script = list(batches)

    @asynccontextmanager
    async def open(self, job: Job) -> AsyncIterator["ScriptedStream"]:
        self.jobs.append(job)
        self.opened.set()
        if self.refusal is not None:
            raise self.refusal
        try:
            yield ScriptedStream(self, job)
        finally:
            self.closed.set()


class ScriptedStream:
    """Every choice gets the whole script, unless a batch says whose it is.

    A prompt whose log probabilities are asked for has some, also where the script has none.
    """

    def __init__(self, backend: ScriptedBackend, job: Job) -> None:
        self._backend = backend
        self._num_choices = job.num_choices
        self._scored: tuple[TokenLogprobs, ...] = ()
        if job.sampling.prompt_logprobs:
            self._scored = (TokenLogprobs(logprob=-1.0),) * (len(job.prompt_token_ids) - 1)

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        for step in self._backend.script:
            if isinstance(step, TokenBatch) and self._scored:
                step = replace(step, prompt_logprobs=step.prompt_logprobs or self._scored)
                self._scored = ()
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step.choice:
                yield step
            else:
                for choice in range(self._num_choices):
                    yield replace(step, choice=choice)

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        self._backend.stops.append(reason)
        self._backend.stopped_choices.append(choice)


@pytest.fixture
def backend(tokenizer: PromptTokenizer, card: ModelCard) -> ScriptedBackend:
    scripted = ScriptedBackend(tokenizer, card.eos_token_ids[-1])
    scripted.say("Paris is the capital.")
    return scripted


@pytest.fixture
def config() -> ClusterConfig:
    return ClusterConfig()


@pytest.fixture
def api(
    card: ModelCard,
    tokenizer: PromptTokenizer,
    config: ClusterConfig,
    backend: ScriptedBackend,
) -> Iterator[InferenceApi]:
    made = InferenceApi.of_one(card, MODEL, config, backend, tokenizer=tokenizer)
    yield made
    made.close()


@dataclass
class Reply:
    """One HTTP response as it came over ASGI."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, part: bytes) -> None:
        self.parts.append(part)
        self._grown.set()

    async def has(self, parts: int) -> None:
        """Waits until the response has this many parts."""
        while len(self.parts) < parts:
            self._grown.clear()
            await self._grown.wait()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        def refuse(literal: str) -> None:
            raise AssertionError(f"{literal} is not JSON")

        return json.loads(self.body, parse_constant=refuse)

    @property
    def error(self) -> dict[str, Any]:
        body = self.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]

    @property
    def data(self) -> list[str]:
        """The data of every server-sent event, read as the WHATWG specification says."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        found = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            lines = [line for line in block.split("\n") if not line.startswith(":")]
            assert all(line.startswith("data: ") for line in lines)
            if lines:
                found.append("\n".join(line.removeprefix("data: ") for line in lines))
        return found

    @property
    def chunks(self) -> list[Any]:
        """The JSON of every event of a stream that ended well."""
        *chunks, last = self.data
        assert last == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


class Http:
    """Calls an ASGI application as a server would, disconnects included."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def reply(self) -> Reply:
        """An empty one, to look at while `send` fills it."""
        return Reply()

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.send("GET", path, [b""], **options)

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", path, [raw], **options)

    async def send(
        self,
        method: str,
        path: str,
        chunks: list[bytes],
        *,
        headers: dict[str, str] | None = None,
        disconnect: asyncio.Event | None = None,
        reply: Reply | None = None,
        takes: int | None = None,
    ) -> Reply:
        """One request. `takes`: the client reads this many parts of the body, and then none."""
        reply = Reply() if reply is None else reply
        pending = list(chunks)
        sent = {"content-type": "application/json"} | (headers or {})

        async def receive() -> dict[str, Any]:
            if pending:
                chunk = pending.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(pending)}
            await (disconnect or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                assert not reply.status
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                if takes is not None and len(reply.parts) >= takes:
                    await asyncio.Event().wait()
                reply.add(message.get("body", b""))
                reply.complete = not message.get("more_body", False)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in sent.items()],
            "server": ("testserver", 80),
            "client": ("testclient", 1),
        }
        await self.app(scope, receive, send)
        return reply

    async def chat(self, content: Any = "What is the capital of France?", **fields: Any) -> Reply:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "The capital of France is", **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


@pytest.fixture
def http(api: InferenceApi) -> Http:
    return Http(create_app(api, readiness=lambda: (True, "")))
