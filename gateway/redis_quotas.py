"""Token buckets in Redis, which all gateways of a cluster share.

A request's quotas are taken in one step there, by Redis' own clock. What is spent as it is used,
token by token, is gathered and told every 50 ms. Whatever is done there is done to buckets in
memory as well: they take over while Redis is away, from where the shared ones were; then each
gateway has the quotas to itself. What was used meanwhile is not told later: the shared buckets have
filled meanwhile, too.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

from core.errors import StoreAway
from core.store.redis_link import RedisLink, evaluate
from gateway.limits import Allowance, MemoryQuotas, Quota, admitted

_TELL_EVERY_S = 0.05
# A bucket that has been full for so long is forgotten, which changes nothing.
_KEEP_MS = 60_000
_LONGEST_KEEP_MS = 7 * 24 * 3600 * 1000

# KEYS: the buckets, each a hash of `level` and `at`. ARGV: the amount, then for each bucket what it
# gains in a minute and what was spent since the last call. Gives for each its level before the
# amount is taken, which is from all or from none. A value that is no number is a full bucket.
_TAKE = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local amount = tonumber(ARGV[1])
local levels, enough = {{}}, true
for i, key in ipairs(KEYS) do
  local per_minute, spent = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local told = redis.call('HMGET', key, 'level', 'at')
  local level, at = tonumber(told[1] or ''), tonumber(told[2] or '')
  if not level or level ~= level or not at or at ~= at or math.abs(level) == math.huge then
    level, at = per_minute, now
  end
  if at > now then
    at = now
  end
  level = math.min(level + (now - at) * per_minute / 60, per_minute)
  levels[i] = math.min(level - spent, per_minute)
  enough = enough and levels[i] >= amount
end
local taken = enough and amount or 0
local reply = {{}}
for i, key in ipairs(KEYS) do
  local per_minute, left = tonumber(ARGV[2 * i]), levels[i] - taken
  local full_ms = (per_minute - left) * 60000 / per_minute
  redis.call('HSET', key, 'level', string.format('%.17g', left), 'at', string.format('%.6f', now))
  redis.call('PEXPIRE', key, math.ceil(math.min(full_ms + {_KEEP_MS}, {_LONGEST_KEEP_MS})))
  reply[i] = string.format('%.17g', levels[i])
end
return reply
"""


class RedisQuotas:
    """Implements QuotaStore. `run` belongs in a task."""

    def __init__(self, link: RedisLink, local: MemoryQuotas | None = None) -> None:
        self._link = link
        self._local = local or MemoryQuotas()
        # Spent and not told yet; at most one entry for each quota that there is.
        self._untold: dict[Quota, int] = {}
        self._spent = asyncio.Event()

    async def take(self, quotas: Sequence[Quota], amount: int) -> tuple[Allowance, ...]:
        """See QuotaStore.take."""
        try:
            levels = await self._shared(quotas, amount)
        except StoreAway:
            return await self._local.take(quotas, amount)
        try:
            allowances = admitted(levels, amount)
        finally:
            taken = amount if all(level >= amount for _, level in levels) else 0
            for quota, level in levels:
                self._local.adopt(quota, level - taken)
        return allowances

    def spend(self, quotas: Sequence[Quota], amount: int) -> None:
        """See QuotaStore.spend."""
        self._local.spend(quotas, amount)
        if self._link.away:
            return
        for quota in quotas:
            self._untold[quota] = self._untold.get(quota, 0) + amount
        self._spent.set()

    async def run(self) -> None:
        """Tells what was spent, until cancelled."""
        while True:
            await self._spent.wait()
            await asyncio.sleep(_TELL_EVERY_S)
            self._spent.clear()
            if quotas := list(self._untold):
                with contextlib.suppress(StoreAway):
                    await self._shared(quotas, 0)

    async def _shared(self, quotas: Sequence[Quota], amount: int) -> list[tuple[Quota, float]]:
        """The levels there before the amount is taken, if it is."""
        told: list[int] = [amount]
        for quota in quotas:
            told += (quota.per_minute, self._untold.pop(quota, 0))
        keys = [self._link.key("quota", quota.subject, quota.resource) for quota in quotas]
        reply = await self._link.call(
            "quota_take", lambda redis: evaluate(redis, _TAKE, keys, *told)
        )
        return list(zip(quotas, self._levels(reply, quotas), strict=True))

    def _levels(self, reply: Any, quotas: Sequence[Quota]) -> list[float]:
        try:
            levels = [float(level) for level in reply]
        except (TypeError, ValueError):
            levels = []
        bounded = all(
            math.isfinite(level) and level <= quota.per_minute
            for level, quota in zip(levels, quotas, strict=False)
        )
        if len(levels) != len(quotas) or not bounded:
            self._link.invalid("quota_take")
            raise StoreAway("Redis' answer is none")
        return levels
