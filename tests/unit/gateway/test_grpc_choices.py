"""Several answers and log probabilities over gRPC."""

from dataclasses import replace

from core.messages import StopReason, TokenLogprobs
from protos.tandem.v1 import inference_pb2 as pb
from tests.unit.gateway.test_grpc_service import Context, call, chat, refused

__all__ = ["call"]  # a fixture


async def test_each_delta_says_whose_it_is_and_the_last_one_why_it_ended(call, backend):
    *deltas, last = await call("Chat", chat(n=3), Context())
    for choice in range(3):
        mine = [each.delta for each in deltas if each.delta.choice == choice]
        assert "".join(delta.text for delta in mine) == "Paris is the capital."
        reasons = [delta.stop_reason for delta in mine]
        assert reasons[-1] == pb.STOP_REASON_EOS
        assert set(reasons[:-1]) == {pb.STOP_REASON_UNSPECIFIED}
    assert last.finished.stop_reason == pb.STOP_REASON_EOS
    assert last.finished.usage.completion_tokens == 3 * len(backend.script)


async def test_a_choice_says_what_stopped_it(call, backend, tokenizer):
    *deltas, last = await call("Chat", chat(n=2, stop=["is"]), Context())
    ends = [each.delta for each in deltas if each.delta.stop_reason]
    assert [(end.choice, end.stop) for end in ends] == [(0, "is"), (1, "is")]
    assert last.finished.stop == "is"
    ids = list(tokenizer.encode_plain("one two"))
    backend.say_ids(ids, 1, StopReason.STOP_SEQUENCE)
    *deltas, _ = await call("Chat", chat(stop_token_ids=ids[-1:]), Context())
    assert deltas[-1].delta.stop_token_id == ids[-1]


async def test_log_probabilities_stand_beside_their_tokens(call, backend):
    told = TokenLogprobs(logprob=-0.25, top_token_ids=(4, 5), top_logprobs=(-0.25, -1.5))
    backend.script = [replace(step, logprobs=(told,)) for step in backend.script]
    *deltas, _ = await call("Chat", chat(logprobs=2), Context())
    assert backend.jobs[0].sampling.top_logprobs == 2
    for each in deltas:
        assert len(each.delta.logprobs) == len(each.delta.token_ids)
        for found in each.delta.logprobs:
            assert (found.logprob, list(found.top_token_ids)) == (-0.25, [4, 5])
            assert list(found.top_logprobs) == [-0.25, -1.5]


async def test_bounds_are_those_of_http(call, backend):
    for options, field in (
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias.-1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias.1"),
    ):
        assert (await refused(call, "Chat", chat(**options))).violation.field == field
    assert backend.jobs == []
