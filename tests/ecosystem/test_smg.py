"""smg's router in front of a cluster: OpenAI's API there, VllmEngine between the two."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from bench.cluster_view import look

_START_TIMEOUT_S = 60.0
_POLL_S = 0.1
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    # Where the router asks a hub for a tokenizer, the test shall fail and not the network be asked.
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | nowhere, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(condition, what: str, timeout_s: float = _START_TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(_POLL_S)


@pytest.fixture(scope="module")
def router(endpoints, programs, free_port, tmp_path_factory) -> Iterator[str]:
    """The URL of a router whose only worker is the cluster."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = tmp_path_factory.mktemp("smg") / "log"
    command = [str(programs("smg") / "smg"), "launch", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", f"grpc://{endpoints.grpc}", "--shutdown-grace-period-secs", "1"]
    with _running(command, log) as process:

        def serves() -> bool:
            if process.poll() is not None:
                pytest.fail(log.read_text()[-4000:])
            try:
                asked = {"model": endpoints.model, "messages": QUESTION, "max_tokens": 1}
                reply = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=30)
            except httpx.HTTPError:
                return False
            return reply.status_code == 200

        _await(serves, "the router serves")
        yield f"{url}/v1"


@pytest.fixture
def ask(endpoints, router):
    """Asks the router, or the cluster itself."""

    def asking(*, directly: bool = False, **options):
        url = endpoints.http if directly else router
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            return client.chat.completions.create(
                **{"model": endpoints.model, "messages": QUESTION, "temperature": 0} | options
            )

    return asking


@pytest.mark.parametrize("limits", [{"max_tokens": 24}, {"max_tokens": 3}, {"stop": [" Paris"]}])
def test_a_chat_through_the_router_is_that_of_the_cluster(ask, limits):
    routed, direct = ask(**limits), ask(directly=True, **limits)
    assert routed.choices[0].message.content == direct.choices[0].message.content
    assert routed.choices[0].finish_reason == direct.choices[0].finish_reason
    assert routed.usage.prompt_tokens == direct.usage.prompt_tokens
    assert routed.usage.completion_tokens == direct.usage.completion_tokens


def test_a_streamed_chat_has_the_same_text_and_usage(endpoints, router, ask):
    whole = ask(max_tokens=24)
    with openai.OpenAI(base_url=router, api_key="none", max_retries=0, timeout=60) as client:
        chunks = list(
            client.chat.completions.create(
                model=endpoints.model,
                messages=QUESTION,
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_answers_and_their_log_probabilities_come_through_the_router(ask):
    told = ask(max_tokens=3, n=2, logprobs=True, top_logprobs=2)
    assert sorted(choice.index for choice in told.choices) == [0, 1]
    for choice in told.choices:
        tokens = choice.logprobs.content
        assert len(tokens) == 3
        assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in tokens)


def test_what_the_cluster_does_not_serve_the_router_refuses(ask):
    regex = {"regex": "(?=a)"}  # no look-around can be held
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.regex"):
        ask(max_tokens=3, extra_body=regex)


def test_a_client_that_leaves_frees_the_cluster(endpoints, router):
    asked = {
        "model": endpoints.model,
        "messages": [{"role": "user", "content": "Count to a thousand."}],
        "stream": True,
        "max_tokens": 4000,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{router}/chat/completions", json=asked, timeout=60) as reply:
        next(reply.iter_lines())
        assert look(endpoints.admin).num_placed == 1
    _await(lambda: look(endpoints.admin).at_rest(2), "the cluster is at rest", 20)
