"""The file of API keys: what `tandem key new` prints is read back; a mistake is one clear line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.main import app
from core.api_keys import KeyEntry, KeyFile, digest_of, entry_toml, hash_of, new_key
from core.errors import ConfigError

HASH = hash_of("a key")


def entry(**fields) -> KeyEntry:
    return KeyEntry(**{"id": "k1", "hash": HASH, "tenant": "acme"} | fields)


def read(tmp_path: Path, text: str) -> KeyFile:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    return KeyFile.read(file)


def test_keys_are_long_random_and_differ():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("tdm-") and len(key) == 47 for key in keys)


def test_what_key_new_prints_opens_what_it_says_and_shows_the_key_apart(tmp_path):
    arguments = "key new --tenant acme --id ci --requests-per-minute 60 --model m --model n"
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 0
    (made,) = read(tmp_path, done.stdout).keys
    key = done.stderr.split()[-1]
    assert key not in done.stdout
    expected = entry(hash=hash_of(key), id="ci", requests_per_minute=60, models=("m", "n"))
    assert made == expected


def test_appending_what_key_new_prints_makes_a_file(tmp_path):
    printed = [CliRunner().invoke(app, ["key", "new", "--tenant", "a"]).stdout for _ in range(3)]
    assert len(read(tmp_path, "".join(printed)).keys) == 3


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3))
def test_any_entry_is_read_back(tmp_path_factory, models):
    made = entry(models=tuple(models), max_priority=-3, tokens_per_minute=7)
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(entry_toml(made))
    assert KeyFile.read(file).keys == (made,)


def test_a_hash_is_of_the_whole_key_and_nothing_else():
    assert digest_of("a").hex() == hash_of("a").removeprefix("sha256:")
    assert hash_of("a") != hash_of("a ")
    assert hash_of("a") == "sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


@pytest.mark.parametrize(
    "text, words",
    [
        ("keys = 3", "keys"),
        ("[[keys]]\nid = 'a'\ntenant = 'a'", "keys.0.hash"),
        (f"[[keys]]\nid = 'a b'\nhash = '{HASH}'\ntenant = 'a'", "keys.0.id"),
        (f"[[keys]]\nid = 'a'\nhash = '{HASH[:-1]}'\ntenant = 'a'", "keys.0.hash"),
        (f"[[keys]]\nid = 'a'\nhash = '{HASH}'\ntenant = ''", "keys.0.tenant"),
        (
            f"[[keys]]\nid = 'a'\nhash = '{HASH}'\ntenant = 'a'\nrequests_per_minute = 0",
            "keys.0.requests_per_minute",
        ),
        (f"[[keys]]\nid = 'a'\nhash = '{HASH}'\ntenant = 'a'\nmodels = []", "keys.0.models"),
        (f"[[keys]]\nid = 'a'\nhash = '{HASH}'\ntenant = 'a'\nrpm = 1", "keys.0.rpm"),
        (entry_toml(entry()) + entry_toml(entry(hash=hash_of("b"))), "id of key k1 stands twice"),
        (entry_toml(entry()) + entry_toml(entry(id="k2")), "hash of key k2 stands twice"),
        (
            "[[clients]]\nid = 'c'\ntenant = 'a'\ncertificate = ''",
            "clients.0.certificate",
        ),
        (
            "[[clients]]\nid = 'c'\ntenant = 'a'\ncertificate = 'x'\n"
            "[[clients]]\nid = 'd'\ntenant = 'a'\ncertificate = 'x'",
            "certificate of client d stands twice",
        ),
        (
            entry_toml(entry()) + "[[clients]]\nid = 'k1'\ntenant = 'a'\ncertificate = 'x'",
            "id of client k1 stands twice",
        ),
        ("[tenants.acme]\ntokens_per_minute = -1", "tenants.acme.tokens_per_minute"),
        ("[[keys", "is not TOML"),
    ],
)
def test_a_mistake_names_the_file_and_the_field_and_quotes_no_hash(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = caught.value.message
    assert message.startswith(f"{tmp_path}/keys.toml") and words in message
    assert "\n" not in message and HASH[-20:-2] not in message


def test_a_file_that_is_not_there_is_told_by_its_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file: cannot read .*No such file"):
        KeyFile.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "arguments, option",
    [
        (["--tenant", "a b"], "--tenant"),
        (["--tenant", "a", "--id", ""], "--id"),
        (["--tenant", "a", "--tokens-per-minute", "0"], "--tokens-per-minute"),
    ],
)
def test_key_new_names_the_option_that_is_wrong(arguments, option):
    done = CliRunner().invoke(app, ["key", "new", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message.startswith(f"{option}: ")
