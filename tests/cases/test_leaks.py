"""RB-O33: nothing of what a client sends is in a log or in an error."""

import json

import pytest
import structlog

from core.errors import Unavailable

CANARY = "CANARY-5521"
MESSAGES = [{"role": "user", "content": CANARY}]


@pytest.fixture
async def silent(capsys):
    """Calls a route that is told the canary, and holds the answer and the logs against it."""
    structlog.configure(processors=[structlog.processors.JSONRenderer()])

    async def check(reply):
        told = reply.body.decode() + json.dumps(reply.headers)
        captured = capsys.readouterr()
        assert CANARY not in told + captured.out + captured.err
        assert all(len(line) < 4096 for line in captured.out.splitlines())
        return reply

    yield check
    structlog.reset_defaults()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": CANARY},
        {"temperature": CANARY, "top_p": CANARY},
        {"stop": [CANARY, ""]},
        {"model": CANARY},
        {"messages": [{"role": CANARY, "content": CANARY}]},
        {"messages": [{"role": "user", "content": [{"type": CANARY, "text": "x"}]}]},
        {"tools": [{"type": "function", "function": {"name": CANARY, "parameters": 5}}]},
        {"response_format": {"type": CANARY}},
        {"modalities": [CANARY]},
        {"max_tokens": 10**6},
    ],
)
async def test_a_refusal_names_the_field_and_not_the_value(http, silent, fields):
    body = {"model": "demo-model", "messages": MESSAGES, **fields}
    headers = {"authorization": f"Bearer {CANARY}"}
    reply = await silent(await http.post("/v1/chat/completions", body, headers=headers))
    assert 400 <= reply.status < 500


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [Unavailable("the worker was lost"), KeyError(CANARY)])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_failure_keeps_what_it_failed_over(http, backend, silent, stream, error, tokens):
    backend.script = [*backend.script[:tokens], error]
    await silent(await http.chat(CANARY, stream=stream))


async def test_nor_does_a_good_answers_log_line_hold_the_prompt(http, backend, silent, capsys):
    await silent(await http.chat(CANARY))
    await silent(await http.post("/tokenize", {"prompt": CANARY[:3] + "x"}))
