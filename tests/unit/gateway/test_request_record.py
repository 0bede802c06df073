"""What is logged of a request, and how loudly it is said that one failed."""

import asyncio

import pytest
import structlog

from core.errors import Cancelled, DeadlineExceeded, Internal, InvalidRequest
from gateway.failure_log import log_failure
from gateway.request_record import RequestRecord, begin, checked_id, current, loggable


def test_nothing_is_in_the_line_that_is_not_known():
    with structlog.testing.capture_logs() as logs:
        RequestRecord(request_id="r", method="GET", path="/x").log(404)
    (line,) = logs
    assert line.pop("duration_s") < 1
    assert line == {
        "event": "request",
        "log_level": "info",
        "method": "GET",
        "path": "/x",
        "status": 404,
        "request_id": "r",
    }


@pytest.mark.parametrize(
    "path, told",
    [
        ("/v1/models", "/v1/models"),
        ("/x?key=secret", "/x"),
        ("/a\nforged=1", "/a\\nforged=1"),
        ("/é\x1b[31m", "/\\xe9\\x1b[31m"),
        ("/" + "x" * 1000, "/" + "x" * 127),
        ("", ""),
    ],
)
def test_a_path_cannot_forge_lines_or_colours(path, told):
    assert loggable(path) == told


@pytest.mark.parametrize("label", ["a", "id 1", "x" * 128, "~!"])
def test_a_printable_label_is_echoed(label):
    assert checked_id(label) == label


@pytest.mark.parametrize("label", ["", "x" * 129, "é", "a\tb", "a\r\nb: c", "\x7f"])
def test_any_other_label_is_refused(label):
    with pytest.raises(InvalidRequest) as caught:
        checked_id(label)
    assert caught.value.field == "X-Request-Id"


async def test_each_request_has_a_record_of_its_own_in_all_its_tasks():
    async def serve(name):
        begin(RequestRecord(request_id=name))
        await asyncio.sleep(0)

        async def below():
            return current().request_id

        return await asyncio.create_task(below())

    assert await asyncio.gather(serve("a"), serve("b")) == ["a", "b"]
    assert current().caller.key_id is None


async def level_of(error, **fields):
    begin(RequestRecord(**fields))
    with structlog.testing.capture_logs() as logs:
        log_failure(error)
    return logs[0]["log_level"]


@pytest.mark.parametrize(
    "error, own_deadline, level",
    [
        (DeadlineExceeded("late"), True, "info"),
        (DeadlineExceeded("late"), False, "error"),
        (Internal("bug"), True, "error"),
        (ValueError("bug"), True, "error"),
        (InvalidRequest("no"), False, "info"),
        (Cancelled("left"), False, "info"),
    ],
)
async def test_only_what_an_operator_has_to_mend_is_an_error(error, own_deadline, level):
    assert await level_of(error, own_deadline=own_deadline) == level
