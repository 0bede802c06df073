"""API keys open what their entry says, and nothing else opens anything."""

import os

import pytest

from core.api_keys import KeyEntry, digest_of, entry_toml, hash_of
from core.config import GatewayConfig
from core.errors import ConfigError, Unauthenticated
from gateway.auth import KeyRing, authenticator_of
from gateway.caller import ANONYMOUS
from gateway.limits import Quota, Resource

KEY = "tdm-right"


def entry(key=KEY, **fields):
    made = {"id": key.removeprefix("tdm-"), "hash": hash_of(key), "tenant": "acme"} | fields
    return entry_toml(KeyEntry(**made))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        entry(models=("m",), requests_per_minute=60, max_priority=5)
        + "[tenants.acme]\ntokens_per_minute = 1000\n"
    )
    return path


@pytest.fixture
def ring(file):
    return KeyRing(file)


def replace(path, text):
    """As editors and secret mounts do it: another file under the same name."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_key_is_its_owner(ring):
    caller = ring.caller(f"Bearer {KEY}", None)
    assert (caller.key_id, caller.tenant, caller.max_priority) == ("right", "acme", 5)
    assert caller.may_use("m") and not caller.may_use("n")
    assert caller.quotas == (
        Quota(subject="key right", resource=Resource.REQUESTS, per_minute=60),
        Quota(subject="tenant acme", resource=Resource.TOKENS, per_minute=1000),
    )


@pytest.mark.parametrize(
    "authorization, api_key",
    [
        (f"Bearer {KEY}", None),
        (f"bearer  {KEY} ", None),
        (f"BEARER {KEY}", "something else"),
        (None, KEY),
    ],
)
def test_both_styles_of_clients_are_understood(ring, authorization, api_key):
    assert ring.caller(authorization, api_key).key_id == "right"


@pytest.mark.parametrize(
    "authorization, api_key",
    [
        (None, None),
        ("", None),
        ("", KEY),  # a client that means to use Authorization has got it wrong
        (KEY, None),
        ("Bearer", None),
        ("Bearer ", None),
        (f"Basic {KEY}", None),
        (f"Bearer {KEY}x", None),
        (f"Bearer {KEY[:-1]}", None),
        (f"Bearer {KEY.upper()}", None),
        (f"Bearer {KEY} {KEY}", None),
        ("Bearer " + "x" * 60_000, None),
        ("Bearer \udcff\x00é", None),
        (f"Bearer {hash_of(KEY)}", None),
        (None, ""),
        (None, "wrong"),
    ],
)
def test_nothing_else_opens(ring, authorization, api_key):
    with pytest.raises(Unauthenticated) as caught:
        ring.caller(authorization, api_key)
    assert KEY not in caught.value.message


def test_look_ups_depend_on_nothing_that_a_caller_can_choose(file):
    """Their time would tell of the keys otherwise: the index differs from one process to another,
    and has neither keys nor hashes of them in it."""
    one, other = KeyRing(file), KeyRing(file)
    assert not set(one._callers) & set(other._callers)
    assert digest_of(KEY) not in one._callers


def test_a_changed_file_is_read_again(ring, file):
    replace(file, entry("tdm-next"))
    ring.refresh()
    assert ring.caller("Bearer tdm-next", None).key_id == "next"
    with pytest.raises(Unauthenticated):
        ring.caller(f"Bearer {KEY}", None)


@pytest.mark.parametrize("broken", ["[[keys", None])
def test_a_broken_or_missing_file_leaves_the_keys_as_they_were(ring, file, broken):
    if broken is None:
        file.unlink()
    else:
        replace(file, broken)
    ring.refresh()
    assert ring.caller(f"Bearer {KEY}", None).key_id == "right"
    replace(file, entry("tdm-next"))
    ring.refresh()
    assert ring.caller("Bearer tdm-next", None).key_id == "next"


def test_without_a_file_everybody_may_call_and_any_key_is_fine():
    everybody = authenticator_of(GatewayConfig())
    assert everybody.caller(None, None) is ANONYMOUS
    assert everybody.caller("Bearer whatever", None) is ANONYMOUS


def test_a_file_that_cannot_be_read_is_told_at_start(tmp_path):
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file"):
        authenticator_of(GatewayConfig(api_keys_file=str(tmp_path / "nowhere")))


def test_a_file_without_keys_opens_for_nobody(tmp_path):
    empty = tmp_path / "keys.toml"
    empty.touch()
    with pytest.raises(Unauthenticated):
        KeyRing(empty).caller(f"Bearer {KEY}", None)
