"""Several answers to one prompt in a real cluster: read once, and each as it would be alone."""

import os
import signal
import threading

import grpc
import httpx
import pytest

from bench.cluster import ALWAYS_HAND_OVER, merged
from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1 import inference_pb2_grpc

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
# Of all tokens some lie so close that a batch of another size orders them the other way; among the
# likeliest they do not.
SAMPLING = {"temperature": 0.9, "top_k": 20, "seed": 77, "ignore_eos": True}
TIMEOUT_S = 120.0


class Answers:
    """What one call brought, by choice."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, int] = {}
        self.finished: pb.Finished | None = None
        self.code = grpc.StatusCode.OK
        self.changed = threading.Condition()

    def take(self, call) -> None:
        try:
            for response in call:
                self._hear(response)
        except grpc.RpcError as error:
            self.code = error.code()
        with self.changed:
            self.changed.notify_all()

    def _hear(self, response) -> None:
        with self.changed:
            if response.HasField("finished"):
                self.finished = response.finished
            else:
                delta = response.delta
                assert delta.choice not in self.ends, "an answer goes on behind its end"
                self.tokens.setdefault(delta.choice, []).extend(delta.token_ids)
                told = [each.logprob for each in delta.logprobs]
                self.logprobs.setdefault(delta.choice, []).extend(told)
                if delta.stop_reason:
                    self.ends[delta.choice] = delta.stop_reason
            self.changed.notify_all()

    def until(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S)


def ask(cluster, prompt: list[int], max_tokens: int, **options) -> Answers:
    answers = Answers()
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        answers.take(begin(channel, prompt, max_tokens, **options))
    return answers


def begin(channel, prompt: list[int], max_tokens: int, **options):
    request = pb.GenerateRequest(
        model=MODEL,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingOptions(max_tokens=max_tokens, **{**SAMPLING, **options}),
    )
    return inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def prompt(encode) -> list[int]:
    return encode("The gardener looked at the sky, and then she decided that")


@pytest.fixture(scope="module", params=["as it comes", "handed over"])
def served(request, start_cluster, cluster):
    """Prompts are read by whoever is sooner, or always by the prefill worker."""
    if request.param == "as it comes":
        yield cluster
        return
    other = start_cluster(settings=ALWAYS_HAND_OVER)
    yield other
    other.close()


def test_the_first_of_four_answers_is_the_one_that_would_come_alone(served, prompt, eventually):
    cluster = served
    four = ask(cluster, prompt, 12, n=4, logprobs=1)
    assert four.code is grpc.StatusCode.OK
    assert {len(tokens) for tokens in four.tokens.values()} == {12}
    assert four.ends == dict.fromkeys(range(4), pb.STOP_REASON_LENGTH)
    assert len({tuple(tokens) for tokens in four.tokens.values()}) == 4
    usage = four.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 48)
    alone = ask(cluster, prompt, 12, logprobs=1)
    assert four.tokens[0] == alone.tokens[0]
    assert four.logprobs[0] == pytest.approx(alone.logprobs[0], abs=1e-3)
    assert ask(cluster, prompt, 12, n=4).tokens == four.tokens
    eventually(cluster.is_at_rest, "every block is free", timeout_s=30)


def test_log_probabilities_are_those_of_the_reference(cluster, prompt, reference):
    """Also of the first token, which another worker than the others' may have sampled."""
    import torch

    told = ask(cluster, prompt, 4, temperature=0.0, logprobs=3)
    tokens = [*prompt, *told.tokens[0]]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([tokens])).logits[0].float()
    expected = [
        float(logits[len(prompt) + i - 1].log_softmax(-1)[token])
        for i, token in enumerate(told.tokens[0])
    ]
    assert told.logprobs[0] == pytest.approx(expected, abs=2e-2)


def test_log_probabilities_of_the_prompt_are_those_of_the_reference(served, encode, reference):
    """Also of a prompt that every prefix cache has, and over several steps."""
    import torch

    ids = encode("The gardener looked at the sky and wondered. " * 30)
    with torch.inference_mode():
        logits = reference.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    expected = logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    body = {"model": MODEL, "prompt": ids, "max_tokens": 2, "n": 2, "seed": 4}
    for asked in ({}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1}):
        reply = httpx.post(
            f"{served.http_url}/v1/completions",
            json=body | asked,
            timeout=TIMEOUT_S,
            trust_env=False,
        ).json()
        if not asked:
            continue
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in reply["choices"]:
            told = choice["logprobs"]["token_logprobs"]
            assert told[0] is None and len(told) == len(ids) + 2
            assert told[1 : len(ids)] == pytest.approx(expected, abs=2e-2)


def test_an_answer_that_one_token_ends_leaves_the_others_their_prompt(served, prompt, eventually):
    """The token that the first answer begins with stops it, wherever the prompt is read."""
    cluster = served
    first = {choice: ids[0] for choice, ids in ask(cluster, prompt, 1, n=8).tokens.items()}
    stop = first[0]
    answers = ask(cluster, prompt, 3, n=8, stop_token_ids=[stop])
    for choice, token_id in first.items():
        ended = answers.ends[choice] == pb.STOP_REASON_STOP_SEQUENCE
        assert answers.tokens[choice][0] == token_id
        if token_id == stop:
            assert ended and len(answers.tokens[choice]) == 1
    assert len(answers.ends) == 8
    eventually(cluster.is_at_rest, "every block is free", timeout_s=30)


def test_a_client_that_leaves_ends_all_answers(cluster, prompt, eventually):
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        call = begin(channel, prompt, 1500, n=4)
        answers = Answers()
        hearing = threading.Thread(target=answers.take, args=(call,))
        hearing.start()
        answers.until(lambda: len(answers.tokens) == 4)
        call.cancel()
        hearing.join(TIMEOUT_S)
    assert answers.code is grpc.StatusCode.CANCELLED
    eventually(cluster.is_at_rest, "every block is free", timeout_s=30)


def test_the_http_api_streams_several_answers(cluster, prompt):
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 5,
        "n": 2,
        "min_tokens": 5,
        "logit_bias": {"2": 100},
        "temperature": 0,
        "echo": True,
    }
    reply = httpx.post(
        f"{cluster.http_url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False
    )
    choices = reply.json()["choices"]
    # The model would only say <|im_end|> (2) with such a bias, and may not for five tokens.
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert choices[0]["text"] == choices[1]["text"]
    assert choices[0]["text"].startswith("The gardener")


def busy(cluster) -> list[str]:
    """The decode workers that compute something."""
    workers = cluster.state().workers
    return [each.name for each in workers if each.role == "decode" and each.num_running]


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_lost_worker_costs_no_answer_a_token(start_cluster, prompt, eventually):
    """Each answer goes on elsewhere behind its own tokens."""
    settings = merged(
        ALWAYS_HAND_OVER, {"decode_workers": 2, "scheduler": {"report_interval_s": 0.1}}
    )
    cluster = start_cluster(settings=settings)
    expected = ask(cluster, prompt, 120, n=3)
    assert {len(tokens) for tokens in expected.tokens.values()} == {120}
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        answers = Answers()
        call = begin(channel, prompt, 120, n=3)
        hearing = threading.Thread(target=answers.take, args=(call,))
        hearing.start()
        answers.until(
            lambda: len(answers.tokens) == 3 and min(map(len, answers.tokens.values())) > 3
        )
        eventually(lambda: bool(busy(cluster)), "the worker reports", timeout_s=30)
        os.kill(cluster.pids()[busy(cluster)[0]], signal.SIGKILL)
        hearing.join(TIMEOUT_S)
    assert answers.code is grpc.StatusCode.OK
    assert answers.tokens == expected.tokens
    assert cluster.events("retrying")
    eventually(cluster.is_at_rest, "every block is free", timeout_s=90)
    cluster.close()
