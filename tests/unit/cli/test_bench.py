"""What `tandem bench` says of a load that it cannot send."""

import pytest
from typer.testing import CliRunner

from cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--workload nope", "no workload nope: one of random, chat, shared-prefix, poisson"),
        ("--requests 0", "--requests must be 1 to"),
        ("--input-len 0", "--input-len must be 1 to"),
        ("--rate 1 --concurrency 2", "not both"),
        ("--token-ids 7", "--token-ids 7 is not LOW:HIGH"),
        ("--raw /nonexistent/x", "no file can be written there"),
        ("--url nowhere", "nowhere is not a URL"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(arguments: str, said: str):
    done = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: ")
    assert said in line
