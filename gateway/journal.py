"""Keeps a record of streamed answers while they run, and takes up those that were cut off.

A client that lost its stream sends the same request again, to any gateway, with the id of the last
event that it has. The journal tells the seed and the tokens so far. They are read again beside the
prompt, as after a lost worker, and the stream goes on behind what the client has: a token depends
on its seed and position and not on who computes it.

The record is written every 50 ms for all streams together, and no token waits for it. What it lacks
at a gateway's death is computed again.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace

import structlog

from core.errors import InvalidRequest, RequestNotFound, StoreAway
from core.messages import Branch, StopReason
from gateway.backend import Job, TokenBatch, TokenStream
from gateway.bookmark import Bookmark, Place
from gateway.journal_store import (
    TOKEN_BYTES,
    Append,
    Head,
    JournalStore,
    Kept,
    Piece,
    Told,
    Verdict,
)

_WRITE_EVERY_S = 0.05
# Stands for the end by a stop string, which the text tells.
_BY_TEXT = StopReason.UNSPECIFIED


class Journal:
    """Owns the records of this gateway's streams. `run` belongs in a task.

    `secret` hides whose streams there are from who can only read the store.
    """

    def __init__(self, store: JournalStore, secret: bytes, *, max_bytes: int) -> None:
        self._store = store
        self._secret = secret
        self._max_tokens = max_bytes // TOKEN_BYTES
        self._due: set[Tracked] = set()
        self._news = asyncio.Event()

    async def track(self, job: Job, *, kind: str, last: Place | None) -> "Tracked":
        """Begins the record of a job's stream, or takes up the one that `last` names.

        Raises RequestNotFound where the tenant has no such stream, InvalidRequest where it was
        another request's, StoreAway.
        """
        digest = _digest(job, kind)
        public_id = job.request_id if last is None else last.request_id
        key = self._key(job.cache_salt, public_id)
        if last is None:
            head = Head(
                digest=digest,
                seed=job.sampling.seed,
                created_unix_s=int(time.time()),
                num_choices=job.num_choices,
            )
            told = tuple(Told() for _ in range(job.num_choices))
            return Tracked(
                self,
                key,
                head,
                told,
                Bookmark(public_id, head.created_unix_s, has=job.num_choices),
                job,
            )
        kept = await self._store.find(key)
        if kept is None:
            raise RequestNotFound("no stream of that id can be resumed")
        if not _fits(kept, job, digest) or len(last.marks) != job.num_choices:
            raise InvalidRequest("is of another request than this one", field="Last-Event-ID")
        if any(mark.num_tokens > job.sampling.max_new_tokens for mark in last.marks):
            raise InvalidRequest("is beyond the answer's end", field="Last-Event-ID")
        owner = secrets.token_hex(8)
        kept = await self._store.find(key, owner=owner)
        if kept is None or not _fits(kept, job, digest):
            raise RequestNotFound("no stream of that id can be resumed")
        bookmark = Bookmark(public_id, kept.head.created_unix_s, has=last.marks)
        return Tracked(self, key, kept.head, kept.choices, bookmark, job, owner=owner)

    async def run(self) -> None:
        """Writes what is new, until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(_WRITE_EVERY_S)
            self._news.clear()
            await self.write()

    async def write(self) -> None:
        """Writes what is new of every stream."""
        due, self._due = list(self._due), set()
        appends = [tracked.append() for tracked in due]
        try:
            verdicts = await self._store.append(appends)
        except StoreAway:
            verdicts = [Verdict.REFUSED] * len(due)
        for tracked, append, verdict in zip(due, appends, verdicts, strict=True):
            tracked.written(append, verdict)

    def due(self, tracked: "Tracked") -> None:
        """The stream has something new."""
        self._due.add(tracked)
        self._news.set()

    def keeps(self, num_tokens: int) -> bool:
        """Whether a stream of so many tokens is kept."""
        return num_tokens <= self._max_tokens

    def _key(self, tenant: str, request_id: str) -> str:
        body = json.dumps([tenant, request_id]).encode()
        return hmac.new(self._secret, b"stream " + body, hashlib.sha256).hexdigest()[:32]


class Tracked:
    """One stream and its record."""

    def __init__(
        self,
        journal: Journal,
        key: str,
        head: Head,
        told: tuple[Told, ...],
        bookmark: Bookmark,
        job: Job,
        *,
        owner: str | None = None,
    ) -> None:
        self._journal = journal
        self._key = key
        self._head = head
        self._told = told
        self.bookmark = bookmark
        self._owner = owner or secrets.token_hex(8)
        self._before = [tuple(each.token_ids) for each in told]
        # Of each choice, tokens that the store has, and whether it has the end.
        self._stored = [len(each.token_ids) for each in told]
        self._end_stored = [each.end is not None for each in told]
        self._begins = owner is None
        self._kept = True
        self._over = False
        self._log = structlog.get_logger()
        # Another gateway took the stream over.
        self.on_taken: Callable[[], None] = lambda: None
        for each in told:  # the last token may be there, and the word that it was the last not
            if each.end is None and len(each.token_ids) >= job.sampling.max_new_tokens:
                each.end = StopReason.LENGTH
        self._ended_before = [each.end for each in told]
        self.job = replace(
            job, sampling=replace(job.sampling, seed=head.seed), sent=self._branches()
        )

    @property
    def goes_on(self) -> bool:
        """Whether any of its choices has not ended."""
        return any(each.end is None for each in self._told)

    def stream(self, live: TokenStream | None) -> TokenStream:
        """What is recorded, and then what comes live, recorded as it comes."""
        return _Recorded(self, live)

    def close(self) -> None:
        """Nothing more comes. Idempotent."""
        self._over = True

    async def replayed(self) -> AsyncIterator[TokenBatch]:
        """What was recorded before."""
        for choice, (ids, end) in enumerate(zip(self._before, self._ended_before, strict=True)):
            if ids or end is not None:
                yield TokenBatch(choice=choice, token_ids=ids, stop_reason=end or None)

    def took(self, batch: TokenBatch) -> None:
        """A batch came live."""
        told = self._told[batch.choice]
        told.token_ids += batch.token_ids
        told.end = told.end if batch.stop_reason is None else batch.stop_reason
        self._changed()

    def stopped(self, choice: int | None) -> None:
        """A stop string ended a choice, or all that went on."""
        for number, told in enumerate(self._told):
            if choice in (None, number) and told.end is None:
                told.end = _BY_TEXT
        self._changed()

    def append(self) -> Append:
        """What the store has not."""
        pieces = [
            Piece(
                choice=choice,
                start=stored,
                token_ids=tuple(told.token_ids[stored:]),
                end=told.end,
            )
            for choice, (told, stored) in enumerate(zip(self._told, self._stored, strict=True))
            if len(told.token_ids) > stored
            or (told.end is not None and not self._end_stored[choice])
        ]
        return Append(
            key=self._key,
            owner=self._owner,
            head=self._head,
            pieces=tuple(pieces),
            begins=self._begins,
        )

    def written(self, append: Append, verdict: Verdict) -> None:
        """What became of it."""
        match verdict:
            case Verdict.KEPT:
                self._begins = False
                for piece in append.pieces:
                    self._stored[piece.choice] = piece.start + len(piece.token_ids)
                    self._end_stored[piece.choice] = piece.end is not None
            case Verdict.GONE:  # the store was emptied: all of it again
                self._begins = True
                self._stored = [0] * len(self._told)
                self._end_stored = [False] * len(self._told)
                self._changed()
            case Verdict.TAKEN:
                self._kept = False
                self._log.info("stream_taken_over", stream=self._key)
                self.on_taken()
            case Verdict.FULL:
                self._kept = False
            case Verdict.REFUSED if not self._over:
                self._changed()

    def _changed(self) -> None:
        if self._kept and not self._journal.keeps(sum(len(each.token_ids) for each in self._told)):
            self._kept = False  # what the store has of it ends by itself
        if self._kept:
            self._journal.due(self)

    def _branches(self) -> tuple[Branch, ...] | None:
        if not any(each.token_ids or each.end is not None for each in self._told):
            return None
        return tuple(
            Branch(choice=choice, sent_token_ids=tuple(each.token_ids))
            for choice, each in enumerate(self._told)
            if each.end is None
        )


class _Recorded:
    """Implements TokenStream over what is recorded and a live stream."""

    def __init__(self, tracked: Tracked, live: TokenStream | None) -> None:
        self._tracked = tracked
        self._live = live

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self._tracked.bookmark.until_marks(self._batches())

    async def _batches(self) -> AsyncIterator[TokenBatch]:
        async for batch in self._tracked.replayed():
            yield batch
        if self._live is not None:
            async for batch in self._live:
                self._tracked.took(batch)
                yield batch

    def stop(self, reason: StopReason, choice: int | None = None) -> None:
        if reason is StopReason.STOP_SEQUENCE:
            self._tracked.stopped(choice)
        if self._live is not None:
            self._live.stop(reason, choice)


def _fits(kept: Kept, job: Job, digest: str) -> bool:
    return hmac.compare_digest(kept.head.digest, digest) and (
        kept.head.num_choices == job.num_choices
    )


def _digest(job: Job, kind: str) -> str:
    """Of everything that an answer depends on but the seed, which may have been drawn."""
    sampling = asdict(replace(job.sampling, seed=0))
    body = json.dumps([kind, job.model, job.num_choices, job.prompt_token_ids, sampling])
    return hashlib.sha256(body.encode()).hexdigest()
