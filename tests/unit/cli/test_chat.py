"""A conversation remembers what was said, and only that."""

import io
from collections.abc import Generator, Mapping, Sequence

import pytest

from cli.chat import Conversation, converse, say_once
from core.errors import TandemError


class _Echo:
    """A server that repeats the last message, and fails where it reads `fail`."""

    def __init__(self) -> None:
        self.asked: list[list[Mapping[str, str]]] = []

    def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, object]
    ) -> Generator[str, None, None]:
        self.asked.append(list(messages))
        yield "You said "
        if messages[-1]["content"] == "fail":
            raise TandemError("worker lost")
        yield messages[-1]["content"]


@pytest.fixture
def server() -> _Echo:
    return _Echo()


def _talk(server: _Echo, system: str | None = None) -> Conversation:
    return Conversation(server, "m", {}, system=system)


def _contents(messages: list[Mapping[str, str]]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def test_one_message_is_answered_on_one_line(server, capsys):
    say_once(_talk(server), "hello")
    assert capsys.readouterr().out == "You said hello\n"


def test_a_broken_answer_still_ends_its_line(server, capsys):
    with pytest.raises(TandemError):
        say_once(_talk(server), "fail")
    assert capsys.readouterr().out == "You said \n"


def test_each_turn_carries_the_ones_before_it(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    converse(_talk(server, system="be brief"))
    assert _contents(server.asked[-1]) == [
        "system: be brief",
        "user: one",
        "assistant: You said one",
        "user: two",
    ]
    assert capsys.readouterr().out == "You said one\nYou said two\n"


def test_reset_forgets_all_but_the_system_message(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/reset\ntwo\n"))
    converse(_talk(server, system="be brief"))
    assert _contents(server.asked[-1]) == ["system: be brief", "user: two"]


def test_quit_ends_it(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/quit\ntwo\n"))
    converse(_talk(server))
    assert len(server.asked) == 1


def test_an_unknown_command_is_not_sent(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n"))
    converse(_talk(server))
    assert server.asked == []
    assert "/reset" in capsys.readouterr().err


def test_a_failed_turn_leaves_no_trace(server):
    talk = _talk(server)
    with pytest.raises(TandemError):
        say_once(talk, "fail")
    say_once(talk, "two")
    assert _contents(server.asked[-1]) == ["user: two"]


def test_a_failure_ends_a_piped_conversation(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("fail\ntwo\n"))
    with pytest.raises(TandemError, match="worker lost"):
        converse(_talk(server))
