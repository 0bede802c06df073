"""What a simulation is told: traces, profiles, loads; each mistake is one line that says where."""

import itertools
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bench.sim.figures import SimSlo
from bench.sim.fit import errors, fit, read_grid
from bench.sim.profile import load_roofline, load_timing, store
from bench.sim.trace import read_trace
from bench.sim.workload import Arrivals, draw, replay
from cli.main import app
from core.errors import ConfigError, InvalidRequest


def _file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def test_csv_and_json_lines_are_read_by_their_columns(tmp_path):
    csv_rows = read_trace(
        _file(tmp_path, "a.csv", AZURE + "2023-11-16 18:15:50.9951690,396,109\n"), None
    )
    assert [(r.prompt_tokens, r.output_tokens) for r in csv_rows] == [(374, 44), (396, 109)]
    assert [r.arrival_s for r in csv_rows] == pytest.approx([0.0, 4.314579])
    line = {"timestamp": 27482, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}
    (row,) = read_trace(_file(tmp_path, "m.jsonl", json.dumps(line)), None)
    assert row.hash_ids == (4, 9)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", "ContextTokens\n5\n", r"row 2, column GeneratedTokens.*: is missing"),
        ("a.csv", AZURE + "2023-11-16 18:15:40.0,5,5\n", r"row 3, column TIMESTAMP: .*before"),
        ("a.csv", AZURE + "yesterday,5,5\n", r"row 3, column TIMESTAMP: .*not a time"),
        ("a.csv", AZURE + "2023-11-16 18:15:50.0,0,5\n", r"row 3, column ContextTokens: 0 tokens"),
        ("a.csv", AZURE + "2023-11-16 18:15:50.0,5,x\n", r"row 3, column GeneratedTokens: 'x'"),
        ("a.csv", "", "no rows"),
        ("m.jsonl", '{"input_length": 5}', r"row 1, column .*output_length.*: is missing"),
        ("m.jsonl", '{"input_length": 5, "output_length": 1.5}', "row 1, column output_length"),
        ("m.jsonl", "{", "row 1: not JSON"),
        ("m.jsonl", "[1]", "row 1: not an object"),
        (
            "m.jsonl",
            '{"input_length": 2000, "output_length": 1, "hash_ids": [1]}',
            "row 1, column hash_ids: 1 ids for 2000 tokens",
        ),
        (
            "m.jsonl",
            '{"input_length": 5, "output_length": 1, "hash_ids": [-1]}',
            "row 1, column hash_ids: not a list of whole numbers",
        ),
        ("m.jsonl", "[" * 100_000, "row 1: not JSON"),
        (
            "m.jsonl",
            '{"input_length": 5, "output_length": 1, "timestamp": 1' + "0" * 400 + "}",
            "row 1, column timestamp: .*not a time",
        ),
        (
            "m.jsonl",
            '{"input_length": 5, "output_length": 1, "timestamp": 1}\n'
            '{"input_length": 5, "output_length": 1}',
            "row 2, column .*timestamp.*: is missing",
        ),
        ("a.csv", AZURE + '2023-11-16 18:15:50.0,5,"' + "5" * 200_000, "row 3: not CSV"),
        ("a.csv", AZURE + "2023-11-16 18:15:50.0,5\n", r"row 3, column GeneratedTokens: None"),
        ("a.csv", AZURE + "2023-11-16 18:15:50.0,5,0\n", r"row 3, column GeneratedTokens: 0 tok"),
        ("a.csv", AZURE + "2023-11-16 18:15:50.0,-5,1\n", r"row 3, column ContextTokens: -5 tok"),
    ],
)
def test_a_mistake_in_a_trace_is_told_with_its_row_and_column(tmp_path, name, text, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        read_trace(_file(tmp_path, name, text), None)


def test_a_mark_at_a_files_beginning_is_no_part_of_its_first_column(tmp_path):
    (row,) = read_trace(_file(tmp_path, "a.csv", "\ufeff" + AZURE), None)
    assert (row.arrival_s, row.prompt_tokens) == (0.0, 374)


def test_a_public_trace_without_its_folder_is_an_error():
    with pytest.raises(InvalidRequest, match="needs --data, a folder with azure/"):
        read_trace("azure-conv", None)
    with pytest.raises(InvalidRequest, match="one of azure-conv"):
        read_trace("azure-chat", None)


def test_arrivals_have_the_rate_and_the_variation(tmp_path):
    rows = read_trace(_file(tmp_path, "a.csv", AZURE), None)

    def gaps(variation):
        arrivals = Arrivals(rate=4.0, num_requests=20_000, variation=variation)
        times = [request.arrival_s for request in draw(rows, arrivals, block_size=16)]
        found = [after - before for before, after in itertools.pairwise(times)]
        mean = sum(found) / len(found)
        return mean, (sum((g - mean) ** 2 for g in found) / len(found)) ** 0.5 / mean

    for variation in (1.0, 3.0):
        mean, found = gaps(variation)
        assert mean == pytest.approx(0.25, rel=0.05)
        assert found == pytest.approx(variation, rel=0.1)


def test_a_trace_is_played_faster_and_needs_times(tmp_path):
    rows = read_trace(_file(tmp_path, "a.csv", AZURE + "2023-11-16 18:15:48.6805900,1,1\n"), None)
    assert [r.arrival_s for r in replay(rows, speed=2.0, block_size=16)] == pytest.approx([0, 1])
    timeless = read_trace(_file(tmp_path, "b.csv", "ContextTokens,GeneratedTokens\n1,1\n"), None)
    with pytest.raises(InvalidRequest, match="no times"):
        replay(timeless, speed=1.0, block_size=16)


def test_efficiencies_that_made_a_grid_are_found_in_it(tmp_path):
    profile = load_roofline("h100-llama-3.1-8b")
    timing = profile.timing()
    lines = ["model,tp,phase,isl,batch,latency_ms"]
    for isl in (128, 1024, 4096, 16384):
        lines.append(f"m,1,static_ctx,{isl},1,{1e3 * timing.prefill_s(isl)}")
        for batch in (1, 16, 128):
            lines.append(
                f"m,1,static_gen,{isl},{batch},{1e3 * timing.decode_s(batch, batch * isl)}"
            )
    points = read_grid(tmp_path / _file(tmp_path, "grid.csv", "\n".join(lines)), "m")
    blank = profile.model_copy(
        update={
            "efficiency": profile.efficiency.model_copy(update={"linear": 0.1, "attention": 0.1})
        }
    )
    assert errors(points, blank)[0] > 0.5
    found = fit(points, blank)
    assert found.prefill_error < 1e-6
    assert found.decode_error < 1e-6
    assert found.profile.efficiency.linear == pytest.approx(0.81)
    assert found.profile.efficiency.attention == pytest.approx(0.51)
    assert found.profile.efficiency.kv_read == pytest.approx(0.95)


def test_the_shipped_profile_is_the_published_model(h100):
    assert h100.kv_tokens == 440_593
    assert h100.kv_token_bytes == 131_072
    assert h100.prefill_s(4096) == pytest.approx(
        4.67e-3
        + 2 * 6.979e9 * 4096 / (0.81 * 989e12)
        + 2 * 32 * 32 * 128 * 4096**2 / (0.51 * 989e12)
    )
    assert h100.decode_s(64, 64 * 1024) == pytest.approx(
        6.26e-3 + 64 * 11.3e-6 + 64 * 1024 * 131072 / (0.95 * 3.35e12)
    )


def test_a_profile_is_stored_and_read_again(tmp_path, h100):
    store(h100, tmp_path / "p.json")
    assert load_timing(str(tmp_path / "p.json")) == h100


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"memory_bytes": 16e9},
            "device.memory_bytes 1.6e.10: .*nothing of 14.4 GB is left for KV",
        ),
        ({"peak_flops": 0}, "device.peak_flops"),
        ({"flops": 1}, "device.flops"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path, change, complaint):
    values = load_roofline("h100-llama-3.1-8b").model_dump()
    values["device"] |= change
    with pytest.raises(ConfigError, match=complaint):
        load_timing(_file(tmp_path, "p.json", json.dumps(values)))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "azure-conv"], "needs --data"),
        (["--trace", "{trace}"], "row 3, column ContextTokens"),
        (["--rate", "0"], "--rate must be positive"),
        (["--requests", "0"], "--requests must be 1 to"),
        (["--variation", "nan"], "--variation must be"),
        (["--find-rate"], "without an SLO"),
        (["--slo-ttft-ms", "0.01"], "--slo-ttft-ms 0.01: the first token of the shortest prompt"),
        (["--slo-tpot-ms", "2"], "--slo-tpot-ms 2: each further token"),
        (["--trace", "{good}", "--slo-tbt10-ms", "2"], "(row 2, 374 tokens) takes 6."),
        (["--find-rate", "--slo-ttft-ms", "0.01"], "no cluster keeps to that"),
        (["--plan", "2", "--slo-ttft-ms", "0.01"], "no cluster keeps to that"),
        (["--find-rate", "--slo-ttft-ms", "13.8", "--requests", "20"], "no load is light enough"),
        (["--slo-tpot-ms", "-1"], "--slo-tpot-ms must be positive"),
        (["--slo-share", "2"], "--slo-share must be in"),
        (["--input-len", "500000"], "--input-len and --output-len: 500064 tokens"),
        (["--trace", "{long}"], "long.csv: row 3, prompt and answer columns: 500001 tokens"),
        (["--trace", "{columns}"], "row 2, column GeneratedTokens"),
        (["--trace", "{back}"], "row 3, column TIMESTAMP"),
        (["--trace", "{nowhere}"], "cannot read"),
        (["--trace", "{out}"], "no trace"),
        (["--profile", "{small}"], "device.memory_bytes"),
        (["--slo-ttft-ms", "nan"], "--slo-ttft-ms must be positive"),
        (["--input-len", "0"], "at least 1 token each"),
        (["--decode", "0"], "at least one decode worker"),
        (["--profile", "b300"], "no profile b300"),
        (["--kill", "decode-7@3"], "no worker decode-7"),
        (["--kill", "decode-0"], "is not WORKER@SECONDS"),
        (["--plan", "0", "--slo-ttft-ms", "9"], "--plan must be 1 to 64"),
        (["--system", "split", "--record", "{out}"], "--record needs a scheduler"),
        (["--plot", "{out}"], "plot"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(tmp_path, arguments, complaint):
    small = load_roofline("h100-llama-3.1-8b").model_dump()
    small["device"]["memory_bytes"] = 16e9
    places = {
        "trace": _file(tmp_path, "t.csv", AZURE + "2023-11-16 18:15:50.0,0,5\n"),
        "long": _file(tmp_path, "long.csv", AZURE + "2023-11-16 18:15:50.0,500000,1\n"),
        "columns": _file(tmp_path, "columns.csv", "ContextTokens\n5\n"),
        "good": _file(tmp_path, "good.csv", AZURE),
        "back": _file(tmp_path, "back.csv", AZURE + "2023-11-16 18:15:40.0,5,5\n"),
        "nowhere": str(tmp_path / "nowhere.csv"),
        "small": _file(tmp_path, "small.json", json.dumps(small)),
        "out": str(tmp_path / "out.txt"),
    }
    done = CliRunner().invoke(app, ["simulate", *(each.format(**places) for each in arguments)])
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_tells_figures_as_json(tmp_path):
    record = tmp_path / "log.jsonl"
    done = CliRunner().invoke(
        app,
        f"simulate --requests 100 --rate 20 --slo-ttft-ms 400 --json --record {record}".split(),
    )
    assert done.exit_code == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["completed"] == figures["requests"] == 90
    assert figures["good_share"] == 1.0
    assert "TTFT" in done.stderr
    assert record.read_text().count('"said"') > 100


def test_a_plan_names_the_best_cluster():
    done = CliRunner().invoke(
        app,
        [
            "simulate",
            "--plan",
            "2",
            "--requests",
            "30",
            "--input-len",
            "2000",
            "--json",
            "--slo-ttft-ms",
            "300",
        ],
    )
    assert done.exit_code == 0, done.stderr
    best = json.loads(done.stdout)
    assert best["prefill_workers"] + best["decode_workers"] == 2
    assert best["goodput_requests_per_s"] > 1


def test_an_slo_share_of_nobody_is_refused():
    with pytest.raises(InvalidRequest, match="slo-share"):
        SimSlo(ttft_ms=5, share=0.0).checked()


def test_the_simulator_starts_without_torch():
    code = (
        "import sys, bench.sim.__main__, bench.sim.scenario, bench.sim.search;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
