"""What a load sends: the same for the same seed, other contents for another arm."""

import itertools
from pathlib import Path

import pytest

from bench.load.drive import poisson_arrivals
from bench.load.plan import LoadPlan, Place, parse_token_ids
from bench.load.request import LoadRequest
from bench.load.summary import Slo
from bench.load.workloads import WORKLOADS, Shape
from core.errors import InvalidRequest

TRACE = "azure/AzureLLMInferenceTrace_conv.csv"
ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\r\nx,100,10\r\nx,300,30\r\nx,9000,5\r\nx,20,0"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with one trace: three requests, one of them long, and one without an answer."""
    (tmp_path / "azure").mkdir()
    (tmp_path / TRACE).write_text(ROWS)
    return tmp_path


def plan(workload: str, data: Path | None = None, **fields: object) -> LoadPlan:
    shape = Shape(data=data) if workload == "poisson" else Shape()
    rate = 5.0 if workload == "poisson" else None
    values = {"shape": shape, "rate": rate, "num_requests": 6, "num_warmup": 2, **fields}
    return LoadPlan(workload=workload, **values).checked()


def prompts(requests: list[LoadRequest]) -> set[object]:
    return {request.prompt for request in requests}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_one_seed_sends_one_load(workload: str, data: Path):
    load = plan(workload, data)
    assert load.measured(Place(arm="a")) == load.measured(Place(arm="a"))
    assert load.measured(Place(arm="a")) != load.measured(Place(arm="a", seed=2))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_prompt_is_sent_twice(workload: str, data: Path):
    load = plan(workload, data)
    places = [Place(arm=arm, round=number) for arm in "ab" for number in (0, 1)]
    sent = [load.measured(place) for place in places] + [load.warm_up(place) for place in places]
    assert len(set.union(*map(prompts, sent))) == sum(map(len, sent))


def test_arms_of_a_round_get_the_same_lengths_and_arrivals(data: Path):
    load = plan("poisson", data)
    one, two = (load.measured(Place(arm=arm)) for arm in "ab")
    assert [(len(r.prompt), r.max_tokens) for r in one] == [
        (len(r.prompt), r.max_tokens) for r in two
    ]
    assert load.arrivals_s(Place(arm="a")) == load.arrivals_s(Place(arm="b"))
    assert load.arrivals_s(Place(round=0)) != load.arrivals_s(Place(round=1))


def test_arms_of_a_round_get_the_same_questions_behind_other_beginnings():
    load = plan("shared-prefix")
    one, two = (load.measured(Place(arm=arm)) for arm in "ab")
    tails = [[str(r.prompt).partition("\n")[2] for r in each] for each in (one, two)]
    assert tails[0] == tails[1]
    assert str(one[0].prompt)[:20] != str(two[0].prompt)[:20]


def test_a_shared_prefix_is_long_and_the_warm_ups_too():
    load = plan("shared-prefix")
    texts = [str(r.prompt) for r in load.measured(Place()) + load.warm_up(Place())]
    common = len(next(iter(texts)))
    while not all(text.startswith(texts[0][:common]) for text in texts):
        common -= 1
    assert texts[0].count("Question:") == 9
    assert common > 0.85 * max(map(len, texts))


def test_random_prompts_are_ordinary_tokens_of_the_length_asked_for():
    shape = Shape(input_len=33, output_len=5, token_ids=(100, 110))
    for request in plan("random", shape=shape).measured(Place()):
        assert (len(request.prompt), request.max_tokens) == (33, 5)
        assert set(request.prompt) <= set(range(100, 110))


def test_chat_is_sent_as_a_message():
    (request,) = plan("chat", num_requests=1).measured(Place())
    assert request.path == "/v1/chat/completions"
    assert request.body("m", ignore_eos=False)["messages"][0]["content"] == request.prompt
    assert "ignore_eos" not in request.body("m", ignore_eos=False)


def test_a_trace_gives_the_lengths_that_fit(data: Path):
    load = plan("poisson", data, num_requests=50).fitted(4096)
    lengths = {(len(r.prompt), r.max_tokens) for r in load.measured(Place())}
    assert lengths == {(100, 10), (300, 30)}


def test_a_scaled_trace_is_shorter(data: Path):
    shape = Shape(data=data, length_scale=0.1)
    load = plan("poisson", shape=shape, num_requests=50).fitted(4096)
    lengths = {(len(r.prompt), r.max_tokens) for r in load.measured(Place())}
    assert lengths == {(10, 1), (30, 3), (900, 1)}


def test_a_poisson_process_has_its_rate_and_begins_at_once():
    times = plan("poisson", Path("unread"), num_requests=4000).arrivals_s(Place())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert times[-1] == pytest.approx(4000 / 5.0, rel=0.06)
    mean = times[-1] / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.08), "exponential gaps: as wide as their mean"


def test_a_draw_of_zero_is_no_gap():
    assert poisson_arrivals([0.0, 0.0], 1.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workload": "nope"}, "no workload nope: one of random, chat"),
        ({"num_requests": 0}, "--requests must be 1 to"),
        ({"num_warmup": -1}, "--warmup must be 0 to"),
        ({"concurrency": 0}, "--concurrency must be 1 to"),
        ({"rate": 0.0}, "--rate must be positive"),
        ({"rate": float("nan")}, "--rate must be positive"),
        ({"timeout_s": -1.0}, "--timeout must be positive"),
        ({"rate": 1.0, "concurrency": 1}, "not both"),
        ({"workload": "poisson"}, "poisson needs --rate"),
        ({"shape": Shape(input_len=0)}, "--input-len must be 1 to"),
        ({"shape": Shape(output_len=0)}, "--output-len must be 1 to"),
        ({"shape": Shape(token_ids=(5, 5))}, "--token-ids 5:5 has no token ids"),
        ({"shape": Shape(trace="arxiv")}, "--trace means nothing to the workload random"),
        ({"workload": "chat", "shape": Shape(input_len=4)}, "--input-len means nothing"),
        ({"slo": Slo(ttft_ms=0.0)}, "--slo-ttft-ms must be positive"),
    ],
)
def test_what_makes_no_load_is_refused_by_name(fields, said):
    with pytest.raises(InvalidRequest) as refused:
        LoadPlan(**fields).checked()
    assert said in refused.value.message


def test_more_tokens_than_the_window_are_refused():
    load = LoadPlan(shape=Shape(input_len=90, output_len=11)).checked()
    with pytest.raises(InvalidRequest, match="are 101 tokens: the window has 100"):
        load.fitted(100)
    assert load.fitted(101).fitted(None).concurrency == 8


def test_a_trace_of_which_nothing_fits_is_refused(data: Path):
    with pytest.raises(InvalidRequest, match="fits a window of 50 tokens: --length-scale"):
        plan("poisson", data).fitted(50).measured(Place())


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(), f"needs --data, a folder with {TRACE}"),
        (Shape(trace="nope"), "no trace nope: one of azure-conv"),
        (Shape(data=Path("/nonexistent")), f"cannot read /nonexistent/{TRACE}"),
    ],
)
def test_a_missing_trace_is_refused_with_what_is_wanted(shape: Shape, said: str):
    with pytest.raises(InvalidRequest) as refused:
        plan("poisson", shape=shape).measured(Place())
    assert said in refused.value.message


def test_a_file_that_is_another_is_refused(data: Path):
    (data / TRACE).write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequest, match="is not the trace azure-conv"):
        plan("poisson", data).measured(Place())


@pytest.mark.parametrize("text", ["", "5", "a:b", "5:", "-1:4"])
def test_a_range_of_token_ids_is_low_and_high(text: str):
    with pytest.raises(InvalidRequest, match="not LOW:HIGH"):
        parse_token_ids(text)
