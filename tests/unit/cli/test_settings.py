"""Flags and file become one configuration, and a mistake names where it was made."""

from pathlib import Path

import pytest

from cli.settings import cluster_config, model_flags, reachable_at
from core.config import ClusterConfig
from core.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text('model = "a"\nprefill_workers = 3\n[gateway]\nhttp_port = 9000\n')
    return path


def test_nothing_given_is_the_defaults():
    assert cluster_config(None, {"model": None}) == ClusterConfig()


def test_a_flag_wins_over_the_file_and_leaves_the_rest(file: Path):
    config = cluster_config(file, {"model": "b", "gateway.grpc_port": 9001, "engine.dtype": None})
    assert config.model == "b"
    assert config.prefill_workers == 3
    assert (config.gateway.http_port, config.gateway.grpc_port) == (9000, 9001)


def test_a_zero_is_a_value(file: Path):
    assert cluster_config(file, {"gateway.http_port": 0}).gateway.http_port == 0
    assert cluster_config(file, {"prefill_workers": 0}).prefill_workers == 0


def test_a_flag_out_of_range_names_the_command_line_and_the_setting():
    with pytest.raises(ConfigError, match=r"^command line: prefill_workers: "):
        cluster_config(None, {"prefill_workers": -1})


def test_a_mistake_in_the_file_names_the_file(file: Path):
    file.write_text("[gateway]\nhttp_prt = 1\n")
    with pytest.raises(ConfigError, match=r"cluster\.toml: gateway\.http_prt: Extra"):
        cluster_config(file, {"gateway.http_port": 1})


def test_a_variable_wins_over_the_file_and_a_flag_over_both(file: Path):
    variables = {
        "TANDEM__GATEWAY__HTTP_PORT": "9100",
        "TANDEM__SERVED_NAME": "tiny",
        "PATH": "/bin",
    }
    config = cluster_config(file, {}, variables)
    assert (config.gateway.http_port, config.served_name) == (9100, "tiny")
    assert cluster_config(file, {"gateway.http_port": 9200}, variables).gateway.http_port == 9200


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("TANDEM__GATEWAY__HTTP_PORT", "many", r"^environment: gateway\.http_port: "),
        ("TANDEM__GATEWAY__HTP_PORT", "1", r"^environment: gateway\.htp_port: Extra"),
        ("TANDEM__GATWAY__HOST", "a", r"^environment: gatway\.host: there are no settings gatway"),
    ],
)
def test_a_mistake_in_the_environment_names_the_setting(variable: str, value: str, told: str):
    with pytest.raises(ConfigError, match=told):
        cluster_config(None, {}, {variable: value})


def test_kv_blocks_come_to_where_the_process_is_reached_unless_another_address_was_chosen():
    network = {"network.schedulers": ("s:1",), "network.advertise_host": "10.0.0.7"}
    assert reachable_at(cluster_config(None, network, {})).transfer.tcp_host == "10.0.0.7"
    chosen = cluster_config(None, {**network, "transfer.tcp_host": "10.1.0.7"}, {})
    assert reachable_at(chosen).transfer.tcp_host == "10.1.0.7"
    assert reachable_at(ClusterConfig()).transfer.tcp_host == "127.0.0.1"


def test_one_model_on_the_command_line_is_the_clusters(file: Path):
    config = cluster_config(file, model_flags(["b"], ["name"]))
    assert (config.model, config.served_name, config.models) == ("b", "name", ())


def test_several_on_the_command_line_win_over_the_one_of_the_file(file: Path):
    config = cluster_config(file, model_flags(["b", "c"], []))
    assert [each.model for each in config.each_model] == ["b", "c"]
    assert config.num_workers == (6, 2)  # the file's three for each
    named = cluster_config(file, model_flags(["b", "c"], ["x", "y"]))
    assert [each.served_name for each in named.each_model] == ["x", "y"]


def test_names_that_are_not_one_for_each_model_are_refused():
    with pytest.raises(ConfigError, match="served_name: 1 given for 2 models"):
        model_flags(["b", "c"], ["x"])
    with pytest.raises(ConfigError, match="served_name: 2 given for 1 models"):
        model_flags(["b"], ["x", "y"])


def test_one_model_on_the_command_line_beside_several_of_the_file_is_refused(file: Path):
    file.write_text('[[models]]\nmodel = "b"\n')
    with pytest.raises(ConfigError, match=r"^command line: models: each has its own model"):
        cluster_config(file, model_flags(["c"], []))


def test_variables_that_are_right_only_together_are_taken_together():
    variables = {"TANDEM__GATEWAY__HOST": "0.0.0.0", "TANDEM__GATEWAY__INSECURE": "true"}
    assert cluster_config(None, {}, variables).gateway.host == "0.0.0.0"
