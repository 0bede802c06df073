"""What `tandem scale` says, and what it does not take."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.scale import report
from core.errors import InvalidRequest, Unavailable

FOUND = {
    "elastic": "auto",
    "override": None,
    "now": {"prefill": 1, "decode": 3},
    "target": {"prefill": 2, "decode": 2},
    "wanted": {"prefill": 2, "decode": 1},
    "load": {"prefill": 1.2, "decode": 0.4},
    "workers": [
        {
            "worker": "decode-0/ab",
            "role": "prefill",
            "turning": True,
            "draining": False,
            "num_placed": 3,
        }
    ],
}


def test_it_tells_who_serves_what_and_what_is_wished_for():
    assert report(FOUND).splitlines() == [
        "now     1 prefill + 3 decode (the demand decides)",
        "target  2 prefill + 2 decode",
        "wanted  2 prefill + 1 decode for the demand alone",
        "load    reading keeps 1.20 workers busy, decoding 0.40",
        "decode-0/ab  prefill     3 placed  turning",
    ]


def test_it_tells_that_a_person_chose_and_how_to_undo_it():
    chosen = report(FOUND | {"override": {"prefill": 2, "decode": 2}})
    assert "(chosen: 2 prefill + 2 decode; `tandem scale --auto` lets the demand" in chosen


def test_before_anything_was_measured_there_is_no_load():
    assert "load" not in report(FOUND | {"load": None, "target": None, "workers": []})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--prefill 2", "--decode is needed as well"),
        ("--decode 2", "--prefill is needed as well"),
        ("--auto --prefill 1", "--auto takes no numbers"),
        ("--url nowhere", "nowhere is not a URL"),
    ],
)
def test_a_wrong_word_is_refused_by_name(arguments, said):
    done = CliRunner().invoke(app, ["scale", *arguments.split()])
    assert done.stdout == ""
    assert isinstance(done.exception, InvalidRequest)
    assert said in done.exception.message


@contextmanager
def scheduler(status: int, told: dict[str, Any], location: str = "") -> Iterator[str]:
    """An admin server that answers everything with this; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.do_GET()

        def do_GET(self) -> None:
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if location:
                self.send_header("location", f"{location}{self.path}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    asked: list[Any] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_where_the_scheduler_stands_by_the_one_that_leads_is_asked():
    with scheduler(200, FOUND) as leader, scheduler(307, {}, leader) as standby:
        for arguments in ((), ("--prefill", "2", "--decode", "2")):
            done = CliRunner().invoke(app, ["scale", "--url", standby, *arguments])
            assert done.exception is None
            assert "1 prefill + 3 decode" in done.stdout


def test_a_leader_that_cannot_be_reached_and_one_that_is_none_are_named():
    with scheduler(307, {}, "http://127.0.0.1:1") as standby:
        done = CliRunner().invoke(app, ["scale", "--url", standby])
        assert isinstance(done.exception, Unavailable)
        assert "stands by" in done.exception.message and "127.0.0.1:1" in done.exception.message
    with scheduler(307, {}, "http://127.0.0.1:1") as other, scheduler(307, {}, other) as standby:
        done = CliRunner().invoke(app, ["scale", "--url", standby])
        assert isinstance(done.exception, Unavailable)
        assert "who answers there stands by" in done.exception.message
    nobody = {"error": {"message": "knows of none that leads"}}
    with scheduler(503, nobody) as standby:
        done = CliRunner().invoke(app, ["scale", "--url", standby])
        assert isinstance(done.exception, Unavailable)
        assert "knows of none that leads" in done.exception.message
