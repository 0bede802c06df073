"""What operators see of a cluster on a terminal."""

import httpx
import pytest
from rich.console import Console

from cli.operator_client import OperatorClient, Snapshot
from cli.top_screen import TopApp
from cli.top_tables import Speedometer, kv_bar, sent_bytes
from cli.waterfall import bar, listed, seconds, waterfall
from core.errors import InvalidRequest, RequestNotFound, Unavailable

TOLD = {
    "request_id": "load-1[bold]",
    "job": "chatcmpl-1",
    "trace_id": "0af7",
    "operation": "chat",
    "model": "m",
    "key": None,
    "outcome": "failed",
    "reason": "worker_lost",
    "began_at": 1.0,
    "duration_s": 2.0,
    "ttft_s": 0.0004,
    "prompt_tokens": 1200,
    "cached_tokens": 16,
    "completion_tokens": None,
    "processes": ["gateway", "scheduler", "prefill-0", "decode-0"],
    "stages": [
        {
            "name": "kv_receive",
            "process": "decode-0",
            "start_s": 1.0,
            "end_s": 2.0,
            "attempt": 2,
            "error": "worker_lost",
        },
        {
            "name": "validate",
            "process": "gateway",
            "start_s": 0.0,
            "end_s": 0.001,
            "attempt": 0,
            "error": None,
        },
    ],
}


def printed(renderable, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def test_a_waterfall_has_each_stage_in_the_order_of_time():
    lines = printed(waterfall(TOLD, 100)).splitlines()
    assert "chatcmpl-1  failed: worker_lost" in lines[0]
    assert (
        "1,200 tokens read (16 cached), - made, first one after 400 µs, all in 2.00 s" in lines[1]
    )
    assert "request load-1[bold]  trace 0af7" in lines[2]
    assert lines[3].startswith("validate") and "1.0 ms" in lines[3]
    assert lines[4].startswith("kv receive #2") and lines[4].rstrip().endswith("worker_lost")
    assert lines[4].count("█") == pytest.approx(24, abs=1)


def test_a_list_has_a_line_for_each_request():
    text = printed(listed([TOLD, TOLD]))
    assert text.count("chatcmpl-1") == 2 and "prefill-0 decode-0" in text
    assert "no request" in printed(listed([]))


@pytest.mark.parametrize(
    "start_s, end_s, drawn",
    [(0, 8, "████████"), (0, 0, "▏"), (4, 8, "    ████"), (8, 8, "       █"), (1, 2.5, " █▌")],
)
def test_a_bar_ends_where_the_time_does_and_can_always_be_seen(start_s, end_s, drawn):
    assert bar(start_s, end_s, 8, 8) == drawn


def test_times_are_written_for_people():
    assert [seconds(s) for s in (None, 0.0005, 0.25, 2.5)] == ["-", "500 µs", "250.0 ms", "2.50 s"]


def worker(name, **fields):
    return {
        "worker": f"{name}/abcd",
        "role": name.partition("-")[0],
        "model": "m",
        "num_blocks": 100,
        "blocks": {"free": 60, "owned": 30, "cached": 10},
        "num_running": 2,
        "num_waiting": 1,
        "num_preempted": 0,
        "backlog_tokens": 1234,
        "step_s": 0.02,
        "draining": False,
        "counters": {},
    } | fields


def model(name, **fields):
    return {
        "model": name,
        "ready": True,
        "reason": "",
        "prefill": 1,
        "decode": 1,
        "num_queued": 0,
        "num_placed": 0,
        "placements": {},
    } | fields


def snapshot(sent=10**9):
    counters = {"shm_bytes_sent": sent, "shm_busy_us": 10**6, "shm_pairings": 1}
    cluster = {
        "num_queued": 7,
        "num_placed": 3,
        "placements": {"disaggregated": 40, "local": 2},
        "scrape_targets": [],
        "models": [
            model("m", num_queued=7, placements={"disaggregated": 40, "local": 2}),
            model("other", ready=False, reason="no decode worker", prefill=0, decode=0),
        ],
        "workers": [
            worker("prefill-9", model="other"),
            worker("decode-0", draining=True),
            worker("prefill-0", counters=counters),
        ],
    }
    sample = {
        "at": 1.0,
        "ttft_p50_s": 0.25,
        "ttft_p95_s": None,
        "itl_p50_s": 0.02,
        "itl_p95_s": 0.04,
        "tokens_per_s": 99.5,
        "in_flight": 3,
    }
    latency = {"samples": [sample], "models": {"m": sample, "other": None}}
    return Snapshot(cluster=cluster, latencies={"gateway": latency})


def test_a_pool_is_drawn_by_state_and_nothing_of_it_is_hidden():
    drawn = kv_bar({"owned": 50, "quarantined": 1, "free": 49}, 100, columns=10)
    assert drawn.plain == "██████░░░░"
    assert kv_bar({"owned": 100, "cached": 1}, 100, columns=10).plain == "█" * 10


def test_speeds_are_those_between_two_looks():
    speed = Speedometer(sent_bytes(snapshot(10**9)), elapsed_s=2.0)
    (row,) = speed.rows(snapshot(2 * 10**9))
    assert row == ("prefill-0", "shm", "1", "2,000.0 MB", "0.500", "2.00")


class Source:
    """A cluster that can go away."""

    away = False

    async def snapshot(self):
        if self.away:
            raise Unavailable("no admin server at [here]")
        return snapshot()


def shown(app, name):
    table = app.query_one(f"#{name}")
    return [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]


async def test_the_screen_shows_the_cluster_and_says_when_it_is_away():
    source = Source()
    app = TopApp(source, "http://x", interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        assert "queue 7" in str(app.query_one("#head").content)
        prefill, decode, _ = shown(app, "workers")
        assert prefill[0] == "prefill-0" and prefill[3:8] == ["40/100", "2", "1", "0", "1,234"]
        assert decode[-1] == "draining"
        assert shown(app, "gateways")[0][1:4] == ["m", "250.0 ms", "-"]
        source.away = True
        await app.look()
        assert "no admin server at [here]" in str(app.query_one("#trouble").content)
        assert len(shown(app, "workers")) == 3  # the last that was known stays
        await pilot.press("p")
        source.away = False
        await app.look()
        assert "no admin server" in str(app.query_one("#trouble").content)
        await pilot.press("p")
        await app.look()
        assert str(app.query_one("#trouble").content) == ""
        await pilot.press("q")
    assert app.return_code == 0


async def test_every_model_has_rows_of_its_own():
    app = TopApp(Source(), "http://x", interval_s=60)
    async with app.run_test(size=(120, 40)):
        assert shown(app, "models") == [
            ["m", "ready", "1", "1", "7", "0", "40", "2"],
            ["other", "no decode worker", "0", "0", "0", "0", "0", "0"],
        ]
        assert [row[:2] for row in shown(app, "workers")] == [
            ["prefill-0", "m"],
            ["decode-0", "m"],
            ["prefill-9", "other"],
        ]
        assert [row[1] for row in shown(app, "gateways")] == ["m", "other"]
        assert shown(app, "gateways")[1][2:] == ["-", "-", "-", "-", "0.0", "0"]


def client(answers):
    """A scheduler's and its gateways' admin servers: by URL, what is answered."""

    def answer(request):
        url = str(request.url)
        if url not in answers:
            raise httpx.ConnectError("refused")
        status, body = answers[url]
        return httpx.Response(status, json=body)

    return OperatorClient("http://s:1/", transport=httpx.MockTransport(answer))


TARGETS = [
    {"process": "gateway", "role": "gateway", "address": "g:1"},
    {"process": "gateway-1", "role": "gateway", "address": "g:2"},
    {"process": "decode-0", "role": "decode", "address": "d:1"},
]
CLUSTER = {"workers": [], "scrape_targets": TARGETS}


async def test_a_request_is_asked_for_at_every_gateway():
    answers = {
        "http://s:1/cluster": (200, CLUSTER),
        "http://g:1/requests/a%2Fb": (404, {"error": "unknown"}),
        "http://g:2/requests/a%2Fb": (200, {"requests": [TOLD]}),
        "http://g:1/requests/x": (404, {"error": "unknown"}),
        "http://g:2/requests/x": (404, {"error": "unknown"}),
    }
    async with client(answers) as asked:
        assert await asked.request("a/b") == [TOLD]
        with pytest.raises(RequestNotFound, match="x"):
            await asked.request("x")


async def test_a_scheduler_that_stands_by_is_passed_over_for_the_one_that_it_names():
    standby = {"leads": False, "leader": "scheduler-1/a", "admin_address": "s:2"}
    answers = {
        "http://s:1/cluster": (200, {"workers": [], "leader": standby}),
        "http://s:2/cluster": (200, CLUSTER | {"leader": {"leads": True}}),
    }
    async with client(answers) as asked:
        assert (await asked.cluster())["scrape_targets"] == TARGETS


async def test_a_gateway_that_is_silent_is_left_out_of_the_picture():
    answers = {
        "http://s:1/cluster": (200, CLUSTER),
        "http://g:2/latency": (200, {"samples": []}),
    }
    async with client(answers) as asked:
        assert set((await asked.snapshot()).latencies) == {"gateway-1"}


@pytest.mark.parametrize(
    "answers, says",
    [
        ({}, "tandem serve"),
        ({"http://s:1/cluster": (200, {"hello": 1})}, "no admin server of a scheduler"),
        ({"http://s:1/cluster": (200, [])}, "does not answer like"),
        ({"http://s:1/cluster": (503, {"error": "busy"})}, "busy"),
    ],
)
async def test_where_there_is_no_cluster_one_line_says_so(answers, says):
    async with client(answers) as asked:
        with pytest.raises(Unavailable, match=says):
            await asked.cluster()


def test_what_is_no_url_is_refused_by_name():
    with pytest.raises(InvalidRequest) as refused:
        OperatorClient("127.0.0.1:8001")
    assert refused.value.field == "--admin-url"
