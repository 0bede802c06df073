"""The desk tells workers to turn, places nothing on them meanwhile, and lets a person choose."""

import httpx
import pytest
from starlette.applications import Starlette

from core.config import SchedulerConfig
from core.errors import InvalidRequest
from core.messages import (
    BlockCounts,
    Compatibility,
    Endpoint,
    Enqueue,
    GatewayHello,
    Placement,
    StepCost,
    TransferId,
    Turn,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Tickets
from scheduler.desk import SchedulerDesk
from scheduler.elastic import Split
from scheduler.front_desk import FrontDesk
from scheduler.scale import scale_routes
from scheduler.split_file import SplitFile

SAME = Compatibility(
    model="m", revision="1", dtype="d", block_size=16, block_bytes=8, layout="l", protocol=1
)
COST = StepCost(base_s=0.01, decode_s=0.001, token_s=0.001, pair_s=0.0)
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


class Cluster:
    """A desk, a clock, one gateway, and workers that do as they are told when asked to."""

    def __init__(self, prefill=2, decode=2, *, kept=None, **config):
        self.now_s = 0.0
        settings = {"elastic": "auto", "elastic_patience_s": 2.0, "elastic_cooldown_s": 0.0}
        self.desk = SchedulerDesk(
            SchedulerConfig(**{**settings, **config}),
            "m",
            Tickets(bytes(32)),
            lambda: self.now_s,
            kept_split=kept,
        )
        self.told, self.placed, self.members = {}, [], {}
        gateway = GatewayHello(gateway=WorkerRef(name="g", incarnation="1"))
        self.desk.gateway_says("g/1", gateway, self._hear)
        for n in range(prefill):
            self.hello(f"prefill-{n}", PREFILL)
        for n in range(decode):
            self.hello(f"decode-{n}", DECODE)

    def _hear(self, message):
        if isinstance(message, Placement):
            self.placed.append(message)

    def hello(self, name, role, *, turning=False):
        ref = WorkerRef(name=name, incarnation="1")
        hello = WorkerHello(
            endpoint=Endpoint(worker=ref, address=f"unix:{name}"),
            role=role,
            compatibility=SAME,
            num_blocks=1000,
            max_seqs=8,
            max_step_tokens=512,
            elastic=True,
        )
        member = self.members[name] = self.desk.worker_joined(hello)
        self.told.setdefault(name, [])
        member.tell = self.told[name].append
        self.report(name, turning=turning)

    def report(self, name, **fields):
        load = WorkerLoad(
            blocks=BlockCounts(free=1000), num_running=0, num_waiting=0, cost=COST, **fields
        )
        self.desk.worker_says(self.members[name], load)

    def after(self, seconds):
        """Time passes, a second at a time."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.desk.decide_now()

    def ask(self, number=0, *, prompt=64, new=64):
        enqueue = Enqueue(
            transfer=TransferId(request_id=f"r{number}", attempt=1),
            model="m",
            prompt_tokens=prompt,
            max_new_tokens=new,
            remaining_s=600.0,
        )
        self.desk.gateway_says("g/1", enqueue, self._hear)

    @property
    def turned(self):
        return {name: [each.role for each in told] for name, told in self.told.items() if told}


def test_a_demand_for_reading_turns_a_decode_worker():
    cluster = Cluster(1, 3)
    for second in range(8):
        for n in range(4):
            cluster.ask(10 * second + n, prompt=500, new=1)
        cluster.after(1)
    ((name, roles),) = cluster.turned.items()
    assert (name[:6], roles) == ("decode", [PREFILL])
    assert cluster.desk.roles.wishes.wanted.prefill >= 2


def test_nothing_is_placed_on_a_worker_that_was_told_to_turn_until_it_has():
    cluster = Cluster(1, 2)
    cluster.desk.choose_split(Split(prefill=2, decode=1))
    cluster.after(1)
    (name,) = cluster.turned
    other = ({"decode-0", "decode-1"} - {name}).pop()
    cluster.ask(1)
    cluster.after(1)
    (placement,) = cluster.placed
    assert placement.decode.worker.name == other
    assert placement.prefill is None or placement.prefill.worker.name == "prefill-0"
    cluster.hello(name, PREFILL, turning=True)
    assert [each.name for each in cluster.desk.cluster.view().prefills] == [
        f"{name}/1",
        "prefill-0/1",
    ]


def test_one_turns_at_a_time_and_each_is_counted():
    cluster = Cluster(1, 3)
    cluster.desk.choose_split(Split(prefill=3, decode=1))
    cluster.after(3)
    assert cluster.turned == {"decode-0": [PREFILL]}
    cluster.hello("decode-0", PREFILL, turning=True)
    cluster.after(3)
    assert len(cluster.turned) == 1, "it still hands over"
    cluster.report("decode-0")
    cluster.after(1)
    assert cluster.turned == {"decode-0": [PREFILL], "decode-1": [PREFILL]}
    cluster.hello("decode-1", PREFILL)
    assert cluster.desk.roles.num_turns == {PREFILL: 2, DECODE: 0}


def test_a_worker_that_does_not_obey_serves_what_it_served():
    cluster = Cluster(1, 2)
    cluster.desk.choose_split(Split(prefill=2, decode=1))
    cluster.after(1)
    assert len(cluster.desk.cluster.view().decodes) == 1
    cluster.desk.choose_split(None)
    cluster.after(20)
    assert len(cluster.desk.cluster.view().decodes) == 2


def test_where_roles_are_fixed_nobody_turns_and_nobody_chooses():
    cluster = Cluster(2, 2, elastic="off")
    with pytest.raises(InvalidRequest) as refused:
        cluster.desk.choose_split(Split(prefill=1, decode=3))
    assert refused.value.field == "scheduler.elastic"
    for n in range(50):
        cluster.ask(n, prompt=500, new=1)
    cluster.after(10)
    assert cluster.turned == {}
    assert cluster.desk.roles.wishes.wanted.prefill >= 3, "an autoscaler is told all the same"


@pytest.mark.parametrize(
    ("split", "field", "said"),
    [
        (Split(prefill=0, decode=4), "prefill", "prefill: 0 is not within 1 to 3"),
        (Split(prefill=1, decode=0), "decode", "decode: 0 is not within 1 to 64"),
        (Split(prefill=3, decode=3), "prefill", "3 and 3 are not 4"),
    ],
)
def test_a_split_that_cannot_be_is_refused_by_name(split, field, said):
    cluster = Cluster(2, 2, max_prefill_workers=3)
    with pytest.raises(InvalidRequest, match=said) as refused:
        cluster.desk.choose_split(split)
    assert refused.value.field == field


def test_a_persons_split_outlives_the_scheduler(tmp_path):
    file = tmp_path / "split.json"
    Cluster(2, 2, kept=SplitFile(file)).desk.choose_split(Split(prefill=1, decode=3))
    again = Cluster(2, 2, kept=SplitFile(file))
    again.after(1)
    assert again.turned == {"prefill-0": [DECODE]}
    again.desk.choose_split(None)
    assert Cluster(2, 2, kept=SplitFile(file)).desk.roles.state().override is None
    file.write_text("{")
    assert SplitFile(file).load() is None


async def asked(cluster, method, **request):
    app = Starlette(routes=scale_routes(FrontDesk([cluster.desk])))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.request(method, "/scale", **request)


async def test_scale_shows_and_chooses():
    cluster = Cluster(2, 2)
    chosen = await asked(cluster, "POST", json={"prefill": 1, "decode": 3})
    assert (chosen.status_code, chosen.json()["override"]) == (200, {"prefill": 1, "decode": 3})
    cluster.after(1)
    shown = (await asked(cluster, "GET")).json()
    assert shown["now"] == {"prefill": 1, "decode": 3}
    assert [each["worker"] for each in shown["workers"] if each["turning"]] == ["prefill-0/1"]
    back = await asked(cluster, "POST", json={"auto": True})
    assert back.json()["override"] is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "the body is"),
        (b'{"auto": false}', "the body is"),
        (b'{"auto": 1}', "the body is"),
        (b'{"prefill": 2}', "the body is"),
        (b'{"prefill": 2, "decode": 2, "more": 1}', "the body is"),
        (b'{"prefill": true, "decode": 3}', "prefill: an integer"),
        (b'{"prefill": 2, "decode": 2.0}', "decode: an integer"),
        (b'{"prefill": 9, "decode": 9}', "9 and 9 are not 4"),
        (b" " * 2000, "longer than 1024 bytes"),
    ],
)
async def test_what_is_no_choice_is_refused_and_changes_nothing(body, said):
    cluster = Cluster(2, 2)
    headers = {"content-type": "application/json"}
    refused = await asked(cluster, "POST", content=body, headers=headers)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
    assert cluster.desk.roles.state().override is None


async def test_of_several_models_one_is_to_be_named():
    cluster = Cluster(2, 2)
    other = SchedulerDesk(SchedulerConfig(), "other", Tickets(bytes(32)))
    app = Starlette(routes=scale_routes(FrontDesk([cluster.desk, other])))
    transport = httpx.ASGITransport(app=app)
    chosen = {"prefill": 1, "decode": 3}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for query in ("", "?model=nobody"):
            for refused in (
                await client.get(f"/scale{query}"),
                await client.post(f"/scale{query}", json=chosen),
            ):
                assert refused.status_code == 400
                told = refused.json()["error"]
                assert told["field"] == "model"
                assert told["message"] == f"must be one of {cluster.desk.model}, other"
        mine = await client.post(f"/scale?model={cluster.desk.model}", json=chosen)
        assert mine.json()["override"] == chosen
        assert (await client.get("/scale?model=other")).json()["override"] is None


async def test_a_web_page_cannot_choose():
    cluster = Cluster(2, 2)
    body = b'{"prefill": 1, "decode": 3}'
    refused = await asked(cluster, "POST", content=body, headers={"content-type": "text/plain"})
    assert refused.status_code == 415
    assert cluster.desk.roles.state().override is None
    assert cluster.turned == {}


def test_a_worker_that_turned_is_not_missed_and_one_that_is_lost_is():
    cluster = Cluster(2, 2)
    configured = Split(prefill=2, decode=2)
    expected = cluster.desk.roles.expected
    cluster.hello("prefill-0", DECODE)
    assert expected(configured) == Split(prefill=1, decode=3)
    cluster.desk.worker_left(cluster.members["decode-1"])
    assert expected(configured) == Split(prefill=2, decode=2), "three are here"
    assert Cluster(1, 1, elastic="off").desk.roles.expected(configured) == configured


def test_what_a_worker_is_told_is_a_turn():
    cluster = Cluster(2, 2)
    cluster.desk.choose_split(Split(prefill=1, decode=3))
    cluster.after(1)
    assert cluster.told["prefill-0"] == [Turn(role=DECODE)]
