"""A stream that was cut off goes on elsewhere with the same text, for its own client alone."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.messages import Branch, StopReason
from gateway.api import InferenceApi
from gateway.backend import TokenBatch
from gateway.bookmark import Mark, Place
from gateway.caller import Caller
from gateway.http_app import create_app
from gateway.journal import Journal
from gateway.journal_store import MemoryJournals

TEXT = "Paris is the capital of France. Größe: 1 € - and that is all there is to say 🙂 about it."
MODEL = "demo-model"
PROMPT = "What is the capital of France?"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "stream": True}


class Writer:
    """A backend that writes the same tokens wherever it begins, as a seeded model does."""

    def __init__(self, tokenizer, eos):
        self.ids = [*tokenizer.encode_plain(TEXT), eos]
        self.jobs = []
        # After so many tokens of a job nothing more comes until `go_on`; None: all come.
        self.breaks_after = None
        self.idle = asyncio.Event()
        self.go_on = asyncio.Event()

    @asynccontextmanager
    async def open(self, job):
        self.jobs.append(job)
        yield _Writing(self, job)


class _Writing:
    def __init__(self, writer, job):
        self._writer = writer
        self._job = job
        self._stopped = set()

    async def __aiter__(self):
        writer = self._writer
        branches = self._job.sent or tuple(Branch(choice=c) for c in range(self._job.num_choices))
        at = {branch.choice: len(branch.sent_token_ids) for branch in branches}
        for branch in branches:  # what it was told is what it would have written itself
            assert list(branch.sent_token_ids) == writer.ids[: len(branch.sent_token_ids)]
        written = 0
        while at:
            for choice in list(at):
                if choice in self._stopped:
                    del at[choice]
                    continue
                if writer.breaks_after is not None and written >= writer.breaks_after:
                    writer.idle.set()
                    await writer.go_on.wait()
                    writer.go_on.clear()
                ids = writer.ids[at[choice] : at[choice] + 1]
                at[choice] += len(ids)
                written += len(ids)
                over = at[choice] >= len(writer.ids)
                yield TokenBatch(
                    choice=choice,
                    token_ids=tuple(ids),
                    stop_reason=StopReason.EOS if over else None,
                )
                if over:
                    del at[choice]

    def stop(self, reason, choice=None):
        self._stopped |= {choice} if choice is not None else set(range(128))


class Keys:
    """Callers by name; without a key it is nobody's."""

    def caller(self, authorization, api_key, names=()):
        return Caller(tenant=api_key or "")

    async def watch(self):
        await asyncio.Event().wait()


@pytest.fixture
def store():
    return MemoryJournals(ttl_s=60, max_bytes=2**16)


@pytest.fixture
def gateway(card, tokenizer, store, http):
    """Makes gateways over one store, each with its own backend."""
    made = []

    def make():
        writer = Writer(tokenizer, card.eos_token_ids[-1])
        journal = Journal(store, bytes(32), max_bytes=2**16)
        config = ClusterConfig(gateway=GatewayConfig(resume=True))
        api = InferenceApi.of_one(card, MODEL, config, writer, tokenizer=tokenizer, journal=journal)
        made.append(api)
        app = create_app(api, readiness=lambda: (True, ""), authenticator=Keys())
        return Gateway(type(http)(app), writer, journal)

    yield make
    for api in made:
        api.close()


def merged(body):
    """The usual body with these fields; ... takes one away."""
    return {key: value for key, value in {**BODY, **(body or {})}.items() if value is not ...}


class Gateway:
    """One gateway's HTTP side, as a client sees it."""

    def __init__(self, http, writer, journal):
        self.http = http
        self.writer = writer
        self.journal = journal

    async def post(self, body=None, *, last=None, key=None, path="/v1/chat/completions"):
        headers = {"last-event-id": last} if last is not None else {}
        headers |= {"api-key": key} if key is not None else {}
        return await self.http.post(path, merged(body), headers=headers)

    async def cut_off(self, body=None, *, after, key=None, path="/v1/chat/completions"):
        """A stream whose client leaves once so many tokens have come; what it has."""
        self.writer.breaks_after = after
        reply, gone = self.http.reply(), asyncio.Event()
        headers = {"api-key": key} if key is not None else {}
        raw = json.dumps(merged(body)).encode()
        sending = asyncio.create_task(
            self.http.send("POST", path, [raw], headers=headers, disconnect=gone, reply=reply)
        )
        async with asyncio.timeout(30):
            await self.writer.idle.wait()
        await asyncio.sleep(0)
        await self.journal.write()
        gone.set()
        await sending
        return reply.body.decode()


def events(body):
    """(id, chunk) of each event; [DONE] as it is."""
    found = []
    for block in body.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        named = next((line[4:] for line in lines if line.startswith("id: ")), None)
        data = next(line[6:] for line in lines if line.startswith("data: "))
        found.append((named, data if data == "[DONE]" else json.loads(data)))
    return found


def last_id(body):
    return [named for named, _ in events(body) if named is not None][-1]


def texts(*bodies):
    """What a client has read of each choice over all its connections."""
    found = {}
    for body in bodies:
        for _, chunk in events(body):
            for choice in chunk["choices"] if chunk != "[DONE]" else ():
                text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def ends(body):
    return [data for _, data in events(body)][-1] == "[DONE]"


@pytest.mark.parametrize("after", [1, 2, 7, 20])
async def test_another_gateway_goes_on_where_the_client_is(gateway, after):
    one, two = gateway(), gateway()
    first = await one.cut_off(after=after)
    rest = (await two.post(last=last_id(first))).body.decode()
    assert texts(first, rest) == {0: TEXT}
    assert ends(rest)
    told = [chunk for _, chunk in events(first + rest) if chunk != "[DONE]"]
    for field in ("id", "created", "model", "object"):
        assert len({chunk[field] for chunk in told}) == 1
    roles = [c for chunk in told for c in chunk["choices"] if "role" in c["delta"]]
    assert len(roles) == 1


async def test_what_the_journal_has_is_not_computed_again(gateway):
    one, two = gateway(), gateway()
    first = await one.cut_off(after=7)
    await two.post(last=last_id(first))
    (job,) = two.writer.jobs
    assert [len(branch.sent_token_ids) for branch in job.sent] == [7]
    assert job.sampling.seed == one.writer.jobs[0].sampling.seed
    assert job.request_id != one.writer.jobs[0].request_id


async def test_a_client_that_is_behind_the_journal_gets_what_it_lacks(gateway):
    one, two = gateway(), gateway()
    first = await one.cut_off(after=12)
    early = first[: first.index(":5\n")]
    early = early[: early.rindex("id: ")]
    rest = (await two.post(last=last_id(early))).body.decode()
    assert texts(early, rest) == {0: TEXT}


async def test_a_client_that_is_ahead_of_the_journal_gets_nothing_twice(gateway, store):
    one, two = gateway(), gateway()
    one.journal.write = lambda: asyncio.sleep(0)
    one.writer.breaks_after = 3
    ahead = await one.cut_off(after=3)  # nothing was written of it
    assert await store.find("any") is None
    del one.journal.write
    await one.journal.write()
    ident = last_id(ahead)
    further = re.sub(r":\d+$", ":9", ident)
    rest = (await two.post(last=further)).body.decode()
    read = texts(rest)[0]
    assert TEXT.endswith(read)
    assert len(read) < len(TEXT)


async def test_a_stream_that_had_ended_is_told_to_its_end_without_computing(gateway):
    one, two = gateway(), gateway()
    whole = (await one.post()).body.decode()
    await one.journal.write()
    cut = whole[: whole.index(":9\n")]
    cut = cut[: cut.rindex("id: ")]
    rest = (await two.post(last=last_id(cut))).body.decode()
    assert texts(cut, rest) == {0: TEXT}
    assert ends(rest)
    assert two.writer.jobs == []
    again = (await two.post(last=last_id(whole))).body.decode()
    assert (texts(again), ends(again)) == ({}, True)


async def test_several_answers_each_go_on_from_their_own_place(gateway):
    one, two = gateway(), gateway()
    body = {"n": 3, "seed": 4, "stream_options": {"include_usage": True}}
    first = await one.cut_off(body, after=11)
    reply = (await two.post(body, last=last_id(first))).body.decode()
    assert texts(first, reply) == dict.fromkeys(range(3), TEXT)
    usage = [c["usage"] for _, c in events(reply) if c != "[DONE]" and c.get("usage")]
    assert usage[0]["completion_tokens"] == 3 * len(two.writer.ids)


@pytest.mark.parametrize("after", [2, 5, 7])
async def test_stop_strings_end_a_resumed_answer_where_they_would_have(gateway, after):
    one, two = gateway(), gateway()
    body = {"stop": ["France. Gr"]}
    first = await one.cut_off(body, after=after)
    rest = (await two.post(body, last=last_id(first))).body.decode()
    assert texts(first, rest) == {0: "Paris is the capital of "}
    assert ends(rest)


async def test_completions_are_resumed_alike_with_their_echo_once(gateway):
    one, two = gateway(), gateway()
    body = {"messages": ..., "prompt": "Where? ", "echo": True}
    first = await one.cut_off(body, after=6, path="/v1/completions")
    rest = (await two.post(body, last=last_id(first), path="/v1/completions")).body.decode()
    assert texts(first, rest) == {0: "Where? " + TEXT}


async def test_an_interrupted_client_may_be_interrupted_again(gateway):
    one, two, three = gateway(), gateway(), gateway()
    first = await one.cut_off(after=4)
    two.writer.breaks_after = 5
    reply, gone = two.http.reply(), asyncio.Event()
    sending = asyncio.create_task(
        two.http.send(
            "POST",
            "/v1/chat/completions",
            [json.dumps(BODY).encode()],
            headers={"last-event-id": last_id(first)},
            disconnect=gone,
            reply=reply,
        )
    )
    async with asyncio.timeout(30):
        await two.writer.idle.wait()
    await asyncio.sleep(0)
    await two.journal.write()
    gone.set()
    await sending
    second = reply.body.decode()
    third = (await three.post(last=last_id(second))).body.decode()
    assert texts(first, second, third) == {0: TEXT}


async def test_who_takes_a_stream_over_ends_it_where_it_ran(gateway):
    one, two = gateway(), gateway()
    one.writer.breaks_after = 4
    reply = one.http.reply()
    raw = [json.dumps(BODY).encode()]
    running = asyncio.create_task(one.http.send("POST", "/v1/chat/completions", raw, reply=reply))
    async with asyncio.timeout(30):
        await one.writer.idle.wait()
    await asyncio.sleep(0)
    await one.journal.write()
    rest = (await two.post(last=last_id(reply.body.decode()))).body.decode()
    assert ends(rest)
    one.writer.idle.clear()
    one.writer.breaks_after = 5
    one.writer.go_on.set()
    await one.writer.idle.wait()
    await asyncio.sleep(0)
    await one.journal.write()
    await running
    assert events(reply.body.decode())[-1][1]["error"]["code"] == "cancelled"


async def test_another_tenants_stream_is_not_there(gateway):
    one, two = gateway(), gateway()
    first = await one.cut_off(after=4, key="acme")
    for key in ("other", None):
        refused = await two.post(last=last_id(first), key=key)
        assert (refused.status, refused.error["code"]) == (404, "request_not_found")
    assert ends((await two.post(last=last_id(first), key="acme")).body.decode())


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "user", "content": "something else"}]},
        {"temperature": 0.5},
        {"max_tokens": 7},
        {"n": 2},
    ],
)
async def test_another_request_cannot_go_on_with_it(gateway, other):
    one, two = gateway(), gateway()
    first = await one.cut_off(after=4)
    refused = await two.post(other, last=last_id(first))
    assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")
    assert ends((await two.post(last=last_id(first))).body.decode())  # nothing was taken away


@pytest.mark.parametrize(
    "last",
    [
        "",
        "1",
        "chatcmpl-xyz:1",
        f"chatcmpl-{'0' * 32}:",
        f"chatcmpl-{'0' * 32}:-1",
        f"chatcmpl-{'0' * 32}:1e1",
        f"chatcmpl-{'0' * 32}:{'9' * 10}",
        f"chatcmpl-{'0' * 32}:{'1,' * 4000}1",
        "../../etc/passwd",
    ],
)
async def test_an_id_that_is_none_is_refused(gateway, last):
    refused = await gateway().post(last=last)
    assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")


async def test_an_unknown_stream_is_not_found_and_only_streams_are_resumed(gateway):
    one = gateway()
    unknown = f"chatcmpl-{'0' * 32}:1"
    assert (await one.post(last=unknown)).status == 404
    refused = await one.post({"stream": False}, last=unknown)
    assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")


async def test_a_place_beyond_the_answers_end_is_refused(gateway):
    one, two = gateway(), gateway()
    first = await one.cut_off({"max_tokens": 100}, after=4)
    beyond = re.sub(r":\d+$", ":101", last_id(first))
    assert (await two.post({"max_tokens": 100}, last=beyond)).status == 400


async def test_streams_with_log_probabilities_have_no_ids(gateway):
    one = gateway()
    body = (await one.post({"logprobs": True})).body.decode()
    assert [named for named, _ in events(body) if named] == []


async def test_where_nothing_is_kept_streams_have_no_ids_and_cannot_be_resumed(http):
    body = (await http.chat(stream=True)).body.decode()
    assert [named for named, _ in events(body) if named] == []
    sent = {"last-event-id": f"chatcmpl-{'0' * 32}:1"}
    refused = await http.post("/v1/chat/completions", BODY, headers=sent)
    assert (refused.status, refused.error["code"]) == (404, "request_not_found")


def test_a_place_is_read_as_it_is_written():
    place = Place.parse(f"cmpl-{'a' * 32}:12,9e,0")
    assert place.marks == (Mark(12), Mark(9, ended=True), Mark())
    assert ",".join(map(str, place.marks)) == "12,9e,0"
