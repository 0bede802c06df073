"""The command line: help with examples, one line per mistake, an exit code that says which."""

import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli.failure import exit_code
from cli.main import app
from cli.serve import curl_line, who_may_call, workers_line
from core.config import GatewayConfig
from core.errors import ConfigError, Unavailable
from deploy.child import ChildRefused


@pytest.mark.parametrize("command", [[], ["serve"], ["chat"]])
def test_help_has_examples(command: list[str]):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"tandem {(command or ['serve'])[0]}" in result.output


def test_help_loads_nothing_heavy():
    program = (
        "import sys, cli.main\n"
        "from typer.testing import CliRunner\n"
        "CliRunner().invoke(cli.main.app, ['--help'])\n"
        "print(sorted({'torch', 'grpc', 'pydantic', 'httpx', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def _tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_configuration_error_is_one_line_and_exit_code_78(tmp_path):
    done = _tandem("serve", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr == f"tandem: cannot read {tmp_path}/none.toml: No such file or directory\n"


def test_a_missing_model_is_one_line_and_exit_code_78(tmp_path):
    done = _tandem(
        *("serve", "--model", str(tmp_path / "none.gguf")),
        *("--http-port", "0", "--grpc-port", "0", "--admin-port", "0"),
    )
    assert done.returncode == 78
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "none.gguf" in done.stderr


def test_no_server_is_one_line_and_exit_code_1():
    done = _tandem("chat", "--url", "http://127.0.0.1:9", "hello")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tandem: no server at http://127.0.0.1:9")
    assert len(done.stderr.splitlines()) == 1


def test_what_a_child_has_said_is_not_said_again(capsys):
    assert exit_code(ChildRefused("decode-0")) == 78
    assert capsys.readouterr().err == ""


def test_errors_are_told_apart_by_their_exit_code(capsys):
    assert exit_code(ConfigError("a")) == 78
    assert exit_code(Unavailable("b")) == 1
    assert exit_code(ValueError("a fault of ours")) is None
    assert capsys.readouterr().err == "tandem: a\ntandem: b\n"


def test_the_line_to_try_is_what_a_shell_takes():
    words = shlex.split(curl_line("http://127.0.0.1:8000", "it's"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization: Bearer $TANDEM_API_KEY" in shlex.split(
        curl_line("http://x", "m", key=True)
    )


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "everybody on this machine: no API keys are configured"),
        (
            {"host": "0.0.0.0", "insecure": True},
            "everybody who reaches it (--insecure): no API keys are configured",
        ),
        ({"api_keys_file": "k"}, "whoever shows an API key"),
        (
            {"tls_cert_file": "c", "tls_key_file": "k", "tls_client_ca_file": "a"},
            "whoever shows a client certificate",
        ),
    ],
)
def test_the_summary_says_who_may_call(settings, words):
    assert who_may_call(GatewayConfig(**settings)) == words


def test_the_summary_says_who_reads_prompts():
    assert workers_line(1, 1) == "1 prefill worker and 1 decode worker"
    assert workers_line(2, 3) == "2 prefill workers and 3 decode workers"
    assert workers_line(0, 1) == "1 decode worker, reading prompts as well"
