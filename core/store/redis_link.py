"""A process's one way to Redis: short waits, and none at all while it is away.

A call that is not answered in time, or finds no connection, opens the breaker. Until a PING of the
background task is answered, every further call fails at once: what Redis is for falls back, and no
request waits for it. An answer that is an error (no memory, a read-only replica, a key of another
type) fails its own call only.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from core.config import RedisConfig
from core.errors import ConfigError, StoreAway

try:
    from redis import exceptions as redis_errors
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ModuleNotFoundError as missing:
    raise ConfigError("redis.url needs the package redis: install the extra `redis`") from missing

T = TypeVar("T")
# Few connections: calls are short, and those of many requests wait for one another.
_MAX_CONNECTIONS = 8
_FIRST_PROBE_S = 0.25
_LAST_PROBE_S = 1.0
# Every kind of failure that is counted.
FAILURES = ("timeout", "connection", "refused", "invalid")


class RedisLink:
    """Owns the connections and the breaker. `run` belongs in a task of the process.

    Raises ConfigError where the URL will not do. It is never logged: it may hold a password.
    """

    def __init__(self, url: str, config: RedisConfig) -> None:
        self.prefix = config.prefix
        self._timeout_s = config.timeout_s
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=config.timeout_s,
                socket_timeout=config.timeout_s,
                socket_connect_timeout=config.timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (ValueError, TypeError):
            raise ConfigError(
                "redis.url is not redis://HOST:PORT/DB, rediss://… or unix:///PATH"
            ) from None
        self._redis: Redis = Redis(connection_pool=pool)
        self._opened = asyncio.Event()
        self.num_calls: Counter[str] = Counter()
        # By operation and by what went wrong, one of FAILURES.
        self.num_failures: Counter[tuple[str, str]] = Counter()
        self._log = structlog.get_logger()

    @property
    def away(self) -> bool:
        """Whether the breaker is open: calls fail without being made."""
        return self._opened.is_set()

    def key(self, *parts: str) -> str:
        """The name of a key of this cluster."""
        return ":".join((self.prefix, *parts))

    async def call(self, operation: str, send: Callable[["Redis"], Awaitable[T]]) -> T:
        """The answer. Raises StoreAway where there is none in time, or the answer is an error."""
        if self.away:
            raise StoreAway("Redis is away")
        self.num_calls[operation] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await send(self._redis)
        except (TimeoutError, redis_errors.TimeoutError):
            self._failed(operation, "timeout", opens=True)
        except (redis_errors.ConnectionError, OSError):
            self._failed(operation, "connection", opens=True)
        except redis_errors.RedisError as error:
            self.refused(operation, error)
        raise StoreAway("Redis does not answer")

    def refused(self, operation: str, error: Exception) -> None:
        """An answer was an error: that of one call of several, say, which fails by itself."""
        # Its first word is a code such as OOM or READONLY; the rest may quote a value.
        self._failed(operation, "refused", why=str(error).partition(" ")[0][:32])

    def invalid(self, operation: str) -> None:
        """A value is not what this software writes: it counts as though it were not there."""
        self._failed(operation, "invalid")

    async def run(self) -> None:
        """Closes the breaker when Redis answers again, until cancelled; then lets go."""
        try:
            while True:
                await self._opened.wait()
                await self._until_back()
                self._opened.clear()
                self._log.info("redis_is_back")
        finally:
            with contextlib.suppress(Exception):  # a connection may be gone already
                await self._redis.aclose(close_connection_pool=True)

    async def _until_back(self) -> None:
        pause_s = _FIRST_PROBE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PROBE_S)
            with contextlib.suppress(TimeoutError, redis_errors.RedisError, OSError):
                async with asyncio.timeout(self._timeout_s):
                    await _answer(self._redis.ping())
                return

    def _failed(self, operation: str, kind: str, *, why: str = "", opens: bool = False) -> None:
        first = not self.num_failures[operation, kind]
        self.num_failures[operation, kind] += 1
        if opens and not self.away:
            self._opened.set()
            self._log.warning("redis_is_away", operation=operation, why=kind)
        elif not opens and first:  # the first tells; the others are counted
            self._log.warning("redis_refused", operation=operation, kind=kind, why=why)


async def _answer(reply: Any) -> Any:
    """What the client's methods give, which their types leave open."""
    return await reply


async def evaluate(redis: "Redis", script: str, keys: list[str], *values: str | int | bytes) -> Any:
    """Runs a Lua script, which Redis does as one step that no other call comes between."""
    client: Any = redis  # whose types do not say what a command gives
    return await client.execute_command("EVAL", script, len(keys), *keys, *values)
