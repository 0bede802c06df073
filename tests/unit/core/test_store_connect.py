"""Where Redis is, and when there must be one."""

import pytest

from core.config import ClusterConfig, NetworkConfig, RedisConfig
from core.errors import ConfigError
from core.store.connect import URL_VARIABLE, connect, redis_url


@pytest.fixture(autouse=True)
def no_redis(monkeypatch):
    monkeypatch.delenv(URL_VARIABLE, raising=False)


def test_one_scheduler_needs_none():
    assert connect(ClusterConfig()) is None


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(schedulers=2),
        ClusterConfig(network=NetworkConfig(schedulers=("one:1", "two:1"))),
    ],
    ids=["of one launcher", "on several hosts"],
)
def test_of_several_only_the_lease_tells_who_leads(config, monkeypatch):
    with pytest.raises(ConfigError, match=r"2 of them need Redis: set redis\.url"):
        redis_url(config)
    monkeypatch.setenv(URL_VARIABLE, "redis://here")
    assert redis_url(config) == "redis://here"


def test_the_setting_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv(URL_VARIABLE, "redis://there")
    assert redis_url(ClusterConfig(redis=RedisConfig(url="redis://here"))) == "redis://here"


def test_a_password_is_in_no_representation_of_the_settings():
    config = ClusterConfig(redis=RedisConfig(url="redis://:sesame@here"))
    assert "sesame" not in repr(config)
