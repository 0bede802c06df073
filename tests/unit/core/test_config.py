"""Configuration is checked once, and a mistake names its file and its field."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from core.config import ClusterConfig, EngineConfig, GatewayConfig
from core.errors import ConfigError


def _from(tmp_path: Path, text: str) -> ClusterConfig:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return ClusterConfig.from_toml(file)


def test_an_empty_file_is_the_defaults(tmp_path: Path):
    assert _from(tmp_path, "") == ClusterConfig()


def test_a_section_is_read(tmp_path: Path):
    config = _from(tmp_path, 'drain_timeout_s = 3\n[engine]\ndtype = "float32"\nthreads = 2\n')
    assert config.drain_timeout_s == 3.0
    assert config.engine == EngineConfig(dtype="float32", threads=2)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("prefill_workers = -1", "prefill_workers"),
        ("decode_workers = 0", "decode_workers"),
        ("decode_workers = 65", "decode_workers"),
        ("prefill_workers = 1.5", "prefill_workers"),
        ("model = 3", "model"),
        ("colour = 'red'", "colour"),
        ("drain_timeout_s = nan", "drain_timeout_s"),
        ("drain_timeout_s = -1.0", "drain_timeout_s"),
        ("gateway = 3", "gateway"),
        ("[gateway]\nhttp_port = 65536", "gateway.http_port"),
        ("[gateway]\nhttp_port = -1", "gateway.http_port"),
        ("[gateway]\nhttp_port = true", "gateway.http_port"),
        ("[gateway]\ngrpc_port = '50051'", "gateway.grpc_port"),
        ("[gateway]\ndefault_timeout_s = inf", "gateway.default_timeout_s"),
        ("[gateway]\nstrict_fields = 1", "gateway.strict_fields"),
        ("[gateway]\nhttp_prot = 1", "gateway.http_prot"),
        ("[scheduler]\nlocal_prefill = true", "scheduler.local_prefill"),
        ("[scheduler]\nreserve_answer_tokens = 0", "scheduler.reserve_answer_tokens"),
        ("prefill_workers = 0\n[scheduler]\nlocal_prefill = 'never'", "scheduler.local_prefill"),
        ("[engine]\ndtype = 'float16'", "engine.dtype"),
        ("[engine]\nmax_model_len = 0", "engine.max_model_len"),
        ("[transfer]\ntransport = 'pigeon'", "transfer.transport"),
    ],
)
def test_a_mistake_names_the_file_and_the_field(tmp_path: Path, text: str, field: str):
    with pytest.raises(ConfigError) as caught:
        _from(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/cluster.toml: {field}: ")
    assert "\n" not in caught.value.message


_TLS = 'tls_cert_file = "c"\ntls_key_file = "k"\n'


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_is_served_without_keys(tmp_path: Path, host: str):
    assert _from(tmp_path, f'[gateway]\nhost = "{host}"').gateway.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "a.example", "localhost.a", ""])
def test_other_machines_are_not_served_without_asking_who_calls(tmp_path: Path, host: str):
    text = f'[gateway]\nhost = "{host}"\n'
    with pytest.raises(ConfigError, match=r"cluster\.toml: gateway: .*insecure") as caught:
        _from(tmp_path, text)
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match="insecure"):
        _from(tmp_path, text + _TLS)  # hides what is said, not who says it
    for asks in ('api_keys_file = "k"', _TLS + 'tls_client_ca_file = "a"', "insecure = true"):
        assert _from(tmp_path, text + asks).gateway.host == host


@pytest.mark.parametrize("section", ["scheduler", "telemetry"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "a.example"])
def test_admin_servers_are_held_to_what_the_api_is(tmp_path: Path, section: str, host: str):
    text = f'[{section}]\nadmin_host = "{host}"\n[gateway]\n'
    with pytest.raises(ConfigError, match=rf"{section}\.admin_host .*insecure") as caught:
        _from(tmp_path, text)
    assert "\n" not in caught.value.message
    for asks in ('api_keys_file = "k"', _TLS + 'tls_client_ca_file = "a"', "insecure = true"):
        assert getattr(_from(tmp_path, text + asks), section).admin_host == host
    assert _from(tmp_path, f'[{section}]\nadmin_host = "::1"')


@pytest.mark.parametrize("text", ['tls_cert_file = "c"', 'tls_key_file = "k"'])
def test_a_certificate_needs_its_key(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="tls_cert_file and tls_key_file go together"):
        _from(tmp_path, f"[gateway]\n{text}")


def test_client_certificates_need_the_servers_own(tmp_path: Path):
    with pytest.raises(ConfigError, match="tls_client_ca_file needs tls_cert_file"):
        _from(tmp_path, '[gateway]\ntls_client_ca_file = "a"')


def test_origins_are_a_list_of_strings(tmp_path: Path):
    config = _from(tmp_path, '[gateway]\ncors_origins = ["https://a", "*"]')
    assert config.gateway.cors_origins == ("https://a", "*")
    with pytest.raises(ConfigError, match=r"gateway\.cors_origins"):
        _from(tmp_path, "[gateway]\ncors_origins = [1]")


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_without_prefill_workers_the_decode_workers_read_prompts(tmp_path: Path, mode: str):
    config = _from(tmp_path, f"prefill_workers = 0\n[scheduler]\nlocal_prefill = '{mode}'\n")
    assert config.prefill_workers == 0


def test_without_anybody_to_read_prompts_the_message_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="'never' and prefill_workers is 0: nobody would read"):
        _from(tmp_path, "prefill_workers = 0\n[scheduler]\nlocal_prefill = 'never'\n")


# --- several models -----------------------------------------------------------------------------

_TWO = """
decode_workers = 2
[scheduler]
max_queued = 7
[[models]]
model = "a.gguf"
served_name = "a"
aliases = ["small"]
max_queued = 3
max_model_len = 512
[[models]]
model = "b.gguf"
prefill_workers = 0
default_max_tokens = 9
"""


def test_one_model_is_a_cluster_of_one():
    config = ClusterConfig(model="x", served_name="y", decode_workers=3)
    (only,) = config.each_model
    assert (only.model, only.served_name) == ("x", "y")
    assert config.of_model(only) == config
    assert config.num_workers == (1, 3)


def test_what_a_model_does_not_say_is_as_the_cluster_says(tmp_path: Path):
    config = _from(tmp_path, _TWO)
    a, b = (config.of_model(model) for model in config.each_model)
    assert (a.model, a.served_name, a.models) == ("a.gguf", "a", ())
    assert (a.prefill_workers, a.decode_workers) == (1, 2)
    assert (b.prefill_workers, b.decode_workers) == (0, 2)
    assert config.num_workers == (1, 4)
    assert (a.scheduler.max_queued, b.scheduler.max_queued) == (3, 7)
    assert (a.engine.max_model_len, b.engine.max_model_len) == (512, None)
    assert (a.gateway.default_max_tokens, b.gateway.default_max_tokens) == (None, 9)


def test_several_models_are_stored_and_read(tmp_path: Path):
    config = _from(tmp_path, _TWO)
    config.store(tmp_path)
    assert ClusterConfig.load(tmp_path) == config


def test_a_process_of_one_model_finds_it_by_any_of_its_names(tmp_path: Path):
    config = _from(tmp_path, _TWO)
    for name in ("a", "small"):
        assert config.of_model_named(name).model == "a.gguf"
    with pytest.raises(ConfigError, match="--serves: no model is served as c; there are: a"):
        config.of_model_named("c")
    with pytest.raises(ConfigError, match="--serves: is needed; there are: a"):
        config.of_model_named(None)
    assert ClusterConfig(model="x").of_model_named(None).model == "x"


_MODEL = '[[models]]\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('model = "a"\n' + _MODEL, "models: each has its own model"),
        ('served_name = "a"\n' + _MODEL, "models: each has its own served_name"),
        ("[[models]]\nserved_name = 'a'", "models.0.model: "),
        (_MODEL + "colour = 1", "models.0.colour: "),
        (_MODEL + "max_queued = 0", "models.0.max_queued: "),
        (_MODEL + "aliases = ['']", "models.0.aliases.0: "),
        (_MODEL + "decode_workers = 0", "models.0.decode_workers: "),
        (_MODEL * 17, "models: "),
        (_MODEL + "aliases = ['a', 'a']", "models: two names or aliases are 'a'"),
        (
            _MODEL + "served_name = 'a'\n" + _MODEL + "aliases = ['a']",
            "models: two names or aliases are 'a'",
        ),
        (
            _MODEL + "prefill_workers = 64\n" + _MODEL,
            "models: 65 prefill and 2 decode workers; at most 64 of each",
        ),
        (
            _MODEL + "prefill_workers = 0\n[scheduler]\nlocal_prefill = 'never'",
            "scheduler.local_prefill: 'never' and prefill_workers is 0 for m: nobody",
        ),
        (_MODEL * 2 + "[gateway]\nvllm_engine = true", "gateway.vllm_engine: "),
    ],
)
def test_models_that_cannot_be_served_together_are_refused(tmp_path: Path, text: str, told: str):
    with pytest.raises(ConfigError) as caught:
        _from(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/cluster.toml: {told}")


@pytest.mark.parametrize("content", [b"model = ", b"\xff\xfe", b"[gateway]\n[gateway]\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes):
    file = tmp_path / "cluster.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cluster\.toml is not TOML"):
        ClusterConfig.from_toml(file)


def test_a_file_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        ClusterConfig.from_toml(tmp_path / "none.toml")


def test_what_the_launcher_stores_is_what_a_process_reads(tmp_path: Path):
    config = ClusterConfig(served_name="é", gateway=GatewayConfig(http_port=0, strict_fields=True))
    config.store(tmp_path)
    assert ClusterConfig.load(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_a_configuration_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        ClusterConfig().model = "other"


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ('schedulers = ["here"]', r"network\.schedulers: 'here' is not host:port"),
        ('schedulers = ["s:0"]', r"network\.schedulers: 's:0' is not host:port"),
        (
            'schedulers = ["s:1"]\nhost = "0.0.0.0"',
            r"network: host 0\.0\.0\.0 .* advertise_host",
        ),
        ("port = 65536", r"network\.port: "),
    ],
)
def test_an_address_that_others_cannot_call_is_refused(tmp_path: Path, toml: str, told: str):
    file = tmp_path / "c.toml"
    file.write_text(f"[network]\n{toml}\n")
    with pytest.raises(ConfigError, match=told):
        ClusterConfig.from_toml(file)


@pytest.mark.parametrize("text", ['cert_file = "c"', 'key_file = "k"\nca_file = "a"', 'name = "x"'])
def test_certificates_between_processes_need_all_three_files(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="cert_file, key_file and ca_file go together; not set:"):
        _from(tmp_path, f"[internal_tls]\n{text}\n")
