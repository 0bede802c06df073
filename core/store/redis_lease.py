"""The leader's lease in Redis: one key that ends by itself, and a counter that does not.

The key holds `{"token": 7, "holder": "scheduler/1f00", "address": "unix:/…", "admin": "host:8001",
"mac": "…"}`. What is read is checked like a client's input. The MAC, under the cluster's secret,
covers holder and addresses: nobody who can only write to Redis sends gateways, or people, to a
scheduler that is none.
"""

import hashlib
import hmac
import json
import re
from typing import Any

from core.errors import StoreAway
from core.store.lease import MAX_TOKEN, Candidate, Lease
from core.store.redis_link import RedisLink, evaluate

_MAX_RECORD_BYTES = 2048
_HOLDER = re.compile(r"[A-Za-z0-9._-]{1,64}/[A-Za-z0-9._-]{1,64}")
_HOST_PORT = r"[A-Za-z0-9.:_\[\]-]{3,512}"
_ADDRESS = re.compile(rf"(unix:/[^\x00-\x1f\x7f]{{1,512}}|{_HOST_PORT})")
_ADMIN_ADDRESS = re.compile(f"({_HOST_PORT})?")

# Gives the record as it then stands. KEYS: the record, the counter. ARGV: the candidate's holder,
# its record from behind the token on, the token that must be surpassed, the lifetime in ms.
_TAKE = f"""
local floor = tonumber(ARGV[3])
local raw = redis.call('GET', KEYS[1])
if raw then
  local sound, record = pcall(cjson.decode, raw)
  if sound and type(record) == 'table' and type(record.token) == 'number' then
    if record.holder ~= ARGV[1] then
      return raw
    end
    if record.token >= floor and record.token <= {MAX_TOKEN} then
      redis.call('PEXPIRE', KEYS[1], ARGV[4])
      return raw
    end
  end
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
if last ~= last or last < 0 or last >= {MAX_TOKEN} then
  last = 0
end
local token = string.format('%d', math.max(math.floor(last), floor) + 1)
local record = '{{"token":' .. token .. ',' .. ARGV[2]
redis.call('SET', KEYS[2], token)
redis.call('SET', KEYS[1], record, 'PX', ARGV[4])
return record
"""
_RELEASE = """
local raw = redis.call('GET', KEYS[1])
if raw then
  local sound, record = pcall(cjson.decode, raw)
  if sound and type(record) == 'table' and record.holder == ARGV[1] then
    redis.call('DEL', KEYS[1])
  end
end
return 0
"""
_DROP = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 0"


class RedisLeases:
    """Implements LeaseStore."""

    def __init__(self, link: RedisLink, secret: bytes) -> None:
        self._link = link
        self._secret = secret
        self._record = link.key("leader")
        self._counter = link.key("leader", "token")

    async def take(self, candidate: Candidate, *, at_least: int, ttl_s: float) -> Lease:
        """See LeaseStore.take. A record that is none is swept away, and the lease is taken."""
        told = {
            "holder": candidate.holder,
            "address": candidate.address,
            "admin": candidate.admin_address,
            "mac": self._mac(candidate),
        }
        rest = json.dumps(told)[1:]
        keys, ttl_ms = [self._record, self._counter], max(1, round(1000 * ttl_s))
        for _ in range(2):
            raw = await self._link.call(
                "lease_take",
                lambda redis: evaluate(
                    redis, _TAKE, keys, candidate.holder, rest, at_least, ttl_ms
                ),
            )
            if (lease := self._read(raw)) is not None:
                return lease
            await self._sweep(raw)
        raise StoreAway("the lease in Redis is none of this cluster's")

    async def read(self) -> Lease | None:
        """See LeaseStore.read."""
        raw = await self._link.call("lease_read", lambda redis: redis.get(self._record))
        return None if raw is None else self._read(raw)

    async def release(self, candidate: Candidate) -> None:
        """See LeaseStore.release."""
        await self._link.call(
            "lease_release",
            lambda redis: evaluate(redis, _RELEASE, [self._record], candidate.holder),
        )

    async def _sweep(self, raw: Any) -> None:
        await self._link.call(
            "lease_sweep", lambda redis: evaluate(redis, _DROP, [self._record], raw)
        )

    def _read(self, raw: Any) -> Lease | None:
        lease = self._parsed(raw)
        if lease is None:
            self._link.invalid("lease_read")
        return lease

    def _parsed(self, raw: Any) -> Lease | None:
        """The lease that a record tells of; None where it is no record of this cluster."""
        if not isinstance(raw, bytes) or len(raw) > _MAX_RECORD_BYTES:
            return None
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        token, holder = record.get("token"), record.get("holder")
        address, admin = record.get("address"), record.get("admin")
        mac = record.get("mac")
        if type(token) is not int or not 0 < token <= MAX_TOKEN:
            return None
        if not (isinstance(holder, str) and _HOLDER.fullmatch(holder)):
            return None
        if not (isinstance(address, str) and _ADDRESS.fullmatch(address)):
            return None
        if not (isinstance(admin, str) and _ADMIN_ADDRESS.fullmatch(admin)):
            return None
        leader = Candidate(holder=holder, address=address, admin_address=admin)
        if not (isinstance(mac, str) and mac.isascii()):
            return None
        if not hmac.compare_digest(mac, self._mac(leader)):
            return None
        return Lease(token=token, leader=leader)

    def _mac(self, candidate: Candidate) -> str:
        told = ("scheduler", candidate.holder, candidate.address, candidate.admin_address)
        parts = [part.encode() for part in told]
        body = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.new(self._secret, body, hashlib.sha256).hexdigest()
