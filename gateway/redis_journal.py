"""Streamed answers' journals in Redis.

Of each stream a hash (`owner`, `head`) and a string that pieces are appended to, a line each time.
Head and lines are JSON behind a MAC under the cluster's secret and the stream's key, so that what
others write is not served to a client; what is read is checked like a client's input all the same.
All that a gateway has to tell goes in one round trip.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

from core.errors import StoreAway
from core.messages import StopReason
from core.store.redis_link import RedisLink, evaluate
from gateway.journal_store import Append, Head, Kept, Piece, Verdict, replayed

_MAX_TOGETHER = 256
_MAX_HEAD_BYTES = 1024
_MAX_TOKEN_ID = 2**31 - 1
_MAC_CHARS = 64

# KEYS: hash, string. ARGV: owner, head, line, lifetime in ms, most bytes of the string, whether the
# stream may begin.
_APPEND = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then
  if ARGV[6] ~= '1' then
    return 'gone'
  end
  redis.call('DEL', KEYS[2])
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'head', ARGV[2])
elseif owner ~= ARGV[1] then
  return 'taken'
end
if redis.call('STRLEN', KEYS[2]) + #ARGV[3] > tonumber(ARGV[5]) then
  redis.call('DEL', KEYS[1], KEYS[2])
  return 'full'
end
redis.call('APPEND', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 'kept'
"""
# KEYS: hash, string. ARGV: the new owner, or nothing; lifetime in ms.
_FIND = """
local head = redis.call('HGET', KEYS[1], 'head')
if not head then
  return false
end
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[1], 'owner', ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
return {head, redis.call('GET', KEYS[2]) or ''}
"""


class RedisJournals:
    """Implements JournalStore."""

    def __init__(self, link: RedisLink, secret: bytes, *, ttl_s: float, max_bytes: int) -> None:
        self._link = link
        self._secret = secret
        self._ttl_ms = round(1000 * ttl_s)
        self._max_bytes = max_bytes

    async def append(self, appends: Sequence[Append]) -> list[Verdict]:
        """See JournalStore.append. What was told before Redis went away may be told again."""
        verdicts: list[Verdict] = []
        for start in range(0, len(appends), _MAX_TOGETHER):
            verdicts += await self._append(appends[start : start + _MAX_TOGETHER])
        return verdicts

    async def find(self, key: str, *, owner: str | None = None) -> Kept | None:
        """See JournalStore.find."""
        reply = await self._link.call(
            "journal_find",
            lambda redis: evaluate(redis, _FIND, self._keys(key), owner or "", self._ttl_ms),
        )
        if reply is None:
            return None
        try:
            head, log = reply
            return self._read(key, head, log)
        except (ValueError, TypeError, KeyError, RecursionError):
            self._link.invalid("journal_find")
            return None

    async def _append(self, appends: Sequence[Append]) -> list[Verdict]:
        async def send(redis: Any) -> list[Any]:
            pipeline = redis.pipeline(transaction=False)
            for each in appends:
                pipeline.execute_command(
                    *("EVAL", _APPEND, 2, *self._keys(each.key), each.owner),
                    *(self._line(each.key, _head_json(each.head)), self._pieces(each)),
                    *(self._ttl_ms, self._max_bytes, int(each.begins)),
                )
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

        replies = await self._link.call("journal_append", send)
        return [self._verdict(reply) for reply in replies]

    def _verdict(self, reply: Any) -> Verdict:
        if isinstance(reply, Exception):
            self._link.refused("journal_append", reply)
            return Verdict.REFUSED
        try:
            return Verdict(reply.decode())
        except (AttributeError, ValueError):
            raise StoreAway("Redis' answer is none") from None

    def _keys(self, key: str) -> list[str]:
        return [self._link.key("stream", key), self._link.key("stream", key, "log")]

    def _pieces(self, append: Append) -> str:
        rows = [
            [each.choice, each.start, list(each.token_ids), None if each.end is None else each.end]
            for each in append.pieces
        ]
        return self._line(append.key, rows) + "\n"

    def _line(self, key: str, value: Any) -> str:
        body = json.dumps(value, separators=(",", ":"))
        return self._mac(key, body) + body

    def _mac(self, key: str, body: str) -> str:
        signed = f"stream {key} {body}".encode()
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()

    def _read(self, key: str, head: bytes, log: bytes) -> Kept:
        """Raises ValueError, TypeError or KeyError where it is no stream of this cluster."""
        if len(head) > _MAX_HEAD_BYTES or len(log) > self._max_bytes:
            raise ValueError("too long")
        told = self._checked(key, head.decode())
        pieces = [
            _piece(row) for line in log.decode().splitlines() for row in self._checked(key, line)
        ]
        kept = replayed(
            Head(
                digest=_of(str, told["digest"]),
                seed=_of(int, told["seed"]),
                created_unix_s=_of(int, told["created_unix_s"]),
                num_choices=_of(int, told["num_choices"]),
            ),
            pieces,
        )
        if kept is None:
            raise ValueError("some is missing")
        return kept

    def _checked(self, key: str, line: str) -> Any:
        mac, body = line[:_MAC_CHARS], line[_MAC_CHARS:]
        if not hmac.compare_digest(mac.encode(), self._mac(key, body).encode()):
            raise ValueError("not of this cluster")
        return json.loads(body)


def _head_json(head: Head) -> dict[str, object]:
    return {
        "digest": head.digest,
        "seed": head.seed,
        "created_unix_s": head.created_unix_s,
        "num_choices": head.num_choices,
    }


def _piece(row: Any) -> Piece:
    choice, start, token_ids, end = row
    ids = tuple(_of(int, token_id) for token_id in token_ids)
    if any(not 0 <= token_id <= _MAX_TOKEN_ID for token_id in ids):
        raise ValueError("no token id")
    return Piece(
        choice=_of(int, choice),
        start=_of(int, start),
        token_ids=ids,
        end=None if end is None else StopReason(end),
    )


def _of(kind: type, value: Any) -> Any:
    """The value. Raises TypeError where it is of another type; a bool is no int."""
    if type(value) is not kind:
        raise TypeError(f"not {kind.__name__}")
    return value
