"""`tandem chat` reads a stream as it comes and tells every failure in one line."""

import json
from collections.abc import Callable

import httpx
import pytest

from cli.client import Client
from core.errors import InvalidRequest, TandemError, Unavailable

QUESTION = [{"role": "user", "content": "Where is Paris?"}]


def _client(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://server/", transport=httpx.MockTransport(answer))


def _events(*events: object) -> httpx.Response:
    lines = [
        f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events
    ]
    return httpx.Response(200, text=": a comment\n\n" + "".join(lines))


def _delta(text: str | None) -> dict[str, object]:
    return {
        "choices": [{"delta": {"content": text} if text is not None else {"role": "assistant"}}]
    }


def test_the_pieces_of_an_answer_come_in_order():
    events = [_delta(None), _delta("In "), _delta("France."), {"choices": []}, "[DONE]"]
    with _client(lambda _: _events(*events)) as client:
        assert list(client.stream_chat("m", QUESTION, {})) == ["In ", "France."]


def test_the_request_carries_model_messages_and_options():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return _events("[DONE]")

    with _client(answer) as client:
        list(client.stream_chat("m", QUESTION, {"temperature": 0.0, "max_tokens": 3}))
    assert seen == [
        {"model": "m", "messages": QUESTION, "stream": True, "temperature": 0.0, "max_tokens": 3}
    ]


def test_a_refusal_is_told_in_the_servers_words():
    refusal = httpx.Response(400, json={"error": {"message": "top_p: must be in (0, 1]"}})
    with _client(lambda _: refusal) as client, pytest.raises(TandemError, match=r"^top_p: must"):
        list(client.stream_chat("m", QUESTION, {}))


def test_a_refusal_without_words_is_told_by_its_status():
    with (
        _client(lambda _: httpx.Response(502, text="<html>")) as client,
        pytest.raises(TandemError, match=r"the server answered 502"),
    ):
        list(client.stream_chat("m", QUESTION, {}))


def test_a_failure_in_the_middle_of_an_answer_is_told_after_its_beginning():
    with _client(lambda _: _events(_delta("In "), {"error": {"message": "worker lost"}})) as client:
        pieces = client.stream_chat("m", QUESTION, {})
        assert next(pieces) == "In "
        with pytest.raises(TandemError, match="worker lost"):
            next(pieces)


def test_a_stream_that_ends_without_its_end_mark_is_an_error():
    with (
        _client(lambda _: _events(_delta("In "))) as client,
        pytest.raises(Unavailable, match="broke off"),
    ):
        list(client.stream_chat("m", QUESTION, {}))


def test_an_event_that_is_not_json_is_an_error_of_the_server():
    with _client(lambda _: _events("{")) as client, pytest.raises(Unavailable, match="not JSON"):
        list(client.stream_chat("m", QUESTION, {}))


def test_no_server_is_one_line_that_says_how_to_start_one():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with _client(refuse) as client:
        for call in (client.first_model, lambda: list(client.stream_chat("m", QUESTION, {}))):
            with pytest.raises(Unavailable, match=r"^no server at http://server: .*tandem serve"):
                call()


def test_the_first_model_that_the_server_names_is_the_default():
    models = httpx.Response(200, json={"data": [{"id": "one"}, {"id": "two"}]})
    with _client(lambda _: models) as client:
        assert client.first_model() == "one"


@pytest.mark.parametrize("body", ["<html>", "{}", '{"data": []}', '{"data": 1}', "[]"])
def test_another_kind_of_server_is_told_apart(body: str):
    with (
        _client(lambda _: httpx.Response(200, text=body)) as client,
        pytest.raises(Unavailable, match="does not answer like"),
    ):
        client.first_model()


def test_a_malformed_url_is_one_line():
    with pytest.raises(InvalidRequest, match="is not a URL"):
        Client("http://host:port")


def test_a_url_without_a_scheme_is_one_line():
    with Client("localhost") as client, pytest.raises(Unavailable, match="localhost failed"):
        client.first_model()
