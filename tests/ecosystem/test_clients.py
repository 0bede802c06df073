"""The clients that people use, unchanged, each in its own environment, against one cluster."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cluster import serving
from bench.cluster_view import look
from core.api_keys import digest_of

pytestmark = pytest.mark.timeout(400)

PROGRAMS = Path(__file__).parent / "programs"
ANSWER = "The capital of France is Paris."
COUNTED = " 5, 6, 7"
Told = dict[str, Any]


@pytest.fixture(scope="module")
def run(programs) -> Callable[..., Told]:
    """What a program of an environment tells of a server."""

    def running(environment: str, program: str, *arguments: str) -> Told:
        python = programs(environment) / "python"
        finished = subprocess.run(
            [str(python), str(PROGRAMS / f"{program}.py"), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"NO_PROXY": "127.0.0.1"},
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        return json.loads(finished.stdout.splitlines()[-1])

    return running


def has_tools(told: Told) -> None:
    """A named tool is called, with arguments that its schema takes."""
    assert "tools_refused" not in told, told["tools_refused"]
    assert told["tool"] == "get_weather"
    assert isinstance(told["arguments"]["city"], str)


@pytest.mark.parametrize("environment, generation", [("openai2", "2."), ("openai3", "3.")])
def test_the_official_client(run, endpoints, environment, generation):
    told = run(environment, "openai_sdk", endpoints.http, endpoints.model, "none")
    assert told["version"].startswith(generation)
    assert told["models"] == [told["model"]] == [endpoints.model]
    assert told["chat"] == told["streamed"] == ANSWER
    assert told["chat_finish"] == "stop"
    assert told["chat_usage"] == told["streamed_usage"] > 0
    assert told["request_id"] == "label-1"
    assert told["completion"] == told["completion_streamed"]
    assert told["completion"].startswith(COUNTED)
    has_tools(told)
    assert told["tool_streamed"] == told["tool"]
    assert told["arguments_streamed"] == told["arguments"]
    assert told["errors"] == {
        "range": ["BadRequestError", 400, "invalid_request", "temperature"],
        "stream": ["BadRequestError", 400, "invalid_request", "temperature"],
        "model": ["NotFoundError", 404, "model_not_found", "model"],
        "unsupported": ["BadRequestError", 400, "unsupported", "modalities"],
        "window": ["BadRequestError", 400, "context_length_exceeded", "max_tokens"],
    }
    assert told["async"] == "left"
    deadline_s = time.monotonic() + 20
    while not look(endpoints.admin).at_rest(2):  # in another process, which no event tells of
        assert time.monotonic() < deadline_s, "the client left, and its work goes on"
        time.sleep(0.05)


def test_langchain(run, endpoints):
    told = run("langchain", "langchain_chat", endpoints.http, endpoints.model, "none")
    assert "Paris" in told["chat"]
    assert told["batch"] == [told["chat"], told["chat"]]
    assert told["streamed"] == told["chat"]
    assert told["chat_usage"] == told["streamed_usage"] > 0
    assert told["completion"] == told["completion_streamed"]
    assert told["completion"].startswith(COUNTED)
    assert told["error"] == [400, "temperature"]
    assert told["no_model"] == "model_not_found"
    has_tools(told)
    assert told["after_tool"]


def test_llamaindex(run, endpoints):
    told = run("llamaindex", "llamaindex_llm", endpoints.http, endpoints.model, "none")
    assert told["models"] == [endpoints.model]
    assert told["chat"] == told["streamed"] == ANSWER
    assert told["completion"] == told["completion_streamed"]
    assert told["completion"].startswith(COUNTED)
    assert told["error"] == [400, "top_p"]
    assert told["no_model"] == "model_not_found"
    has_tools(told)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A cluster that knows one key, which may ask once a minute, and the key."""
    key = "tdm-once-a-minute"
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(
        f'[[keys]]\nid = "one"\ntenant = "one"\nrequests_per_minute = 1\n'
        f'hash = "sha256:{digest_of(key).hex()}"\n'
    )
    file.chmod(0o600)
    settings = {
        "gateway": {"api_keys_file": str(file)},
        "engine": {"threads": 1, "prefill_kv_bytes": 2**28, "decode_kv_bytes": 2**28},
    }
    with serving(settings) as found:
        yield found, key


@pytest.mark.parametrize("environment", ["openai2", "openai3"])
def test_keys_and_quotas_have_their_exceptions(run, guarded, environment):
    endpoints, key = guarded
    told = run(environment, "openai_refused", endpoints.http, endpoints.model, key)
    assert told["unknown"] == ["AuthenticationError", 401, "invalid_api_key", False]
    assert told["second"] == ["RateLimitError", 429, "rate_limit_exceeded", True]
    # The minute is shared with the other generation's run.
    assert told["first"] == [] or told["first"] == told["second"]
