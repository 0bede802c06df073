"""From the configuration to Redis, where there is one; else its package is not even imported."""

import os
from typing import TYPE_CHECKING

from core.config import ClusterConfig
from core.errors import ConfigError
from core.store.lease import LeaseStore

if TYPE_CHECKING:
    from core.store.redis_link import RedisLink

URL_VARIABLE = "TANDEM_REDIS_URL"


def redis_url(config: ClusterConfig) -> str | None:
    """Where Redis is; None where there is none.

    Raises ConfigError where one is needed: of several schedulers only the lease tells who leads.
    """
    url = config.redis.url or os.environ.get(URL_VARIABLE) or None
    several = config.num_schedulers
    if url is None and several > 1:
        raise ConfigError(
            f"schedulers: {several} of them need Redis: set redis.url, or {URL_VARIABLE}"
        )
    return url


def connect(config: ClusterConfig) -> "RedisLink | None":
    """The process's link to Redis, where there is one; whoever asks runs it.

    Raises ConfigError where the URL will not do, or the package is not there.
    """
    url = redis_url(config)
    if url is None:
        return None
    from core.store.redis_link import RedisLink

    return RedisLink(url, config.redis)


def leases_in(link: "RedisLink", secret: bytes) -> LeaseStore:
    """The leader's lease there. `secret` is the cluster's."""
    from core.store.redis_lease import RedisLeases

    return RedisLeases(link, secret)
