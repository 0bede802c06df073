"""Signed tickets: who may ask a worker to compute, and who may write into a worker's blocks.

HMAC-SHA256 over every field, under a secret that scheduler and workers of one cluster share.
The gateway only carries tickets. A ticket names one transfer, both workers in their present lives,
what it is good for, and when it ends; a worker's restart or another attempt makes it void.
"""

import enum
import hmac
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, Forbidden
from core.fence import Fence
from core.messages import Ticket, TransferId, WorkerRef

SECRET_FILE = "secret"
SECRET_VARIABLE = "TANDEM_SECRET"
_MIN_SECRET_BYTES = 16
# Clocks of different hosts differ; a ticket is short-lived beside this only by design.
_CLOCK_SKEW_S = 30.0


class Right(enum.Enum):
    """What a ticket is good for. A ticket for one is void for the other."""

    HANDOFF = "handoff"  # scheduler → both workers: this request may be prefilled and decoded
    WRITE = "write"  # sender → receiver: this connection writes KV blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a ticket vouches for. A connection's ticket names no single transfer.

    Without a prefill worker it is the decode worker that reads the prompt.
    """

    right: Right
    prefill: WorkerRef | None
    decode: WorkerRef
    transfer: TransferId | None = None

    def encoded(self, expires_unix_s: float) -> bytes:
        """Every field with its length, so that no two claims have equal bytes.

        What may be absent is led by the number of its parts that follow.
        """
        prefill, transfer = self.prefill, self.transfer
        parts = (
            self.right.value,
            *(("0",) if prefill is None else ("2", prefill.name, prefill.incarnation)),
            self.decode.name,
            self.decode.incarnation,
            *(("0",) if transfer is None else ("2", transfer.request_id, str(transfer.attempt))),
            repr(expires_unix_s),
        )
        encoded = [part.encode() for part in parts]
        return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


class Tickets:
    """Signs and checks under one secret. `now_s` gives Unix time.

    Where there is a `fence`, a scheduler signs under its token, and a scheduler's ticket must be of
    a leader that it admits.
    """

    def __init__(
        self,
        secret: bytes,
        now_s: Callable[[], float] = time.time,
        *,
        fence: Fence | None = None,
    ) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ConfigError(f"the cluster's secret needs at least {_MIN_SECRET_BYTES} bytes")
        self._secret = secret
        self._now_s = now_s
        self._fence = fence

    def sign(self, claim: Claim, *, lifetime_s: float) -> Ticket:
        """A ticket for the claim that ends after `lifetime_s`."""
        expires_unix_s = self._now_s() + lifetime_s
        leader_token = 0
        if self._fence is not None and claim.right is Right.HANDOFF:
            leader_token = self._fence.token
        mac = self._mac(claim, expires_unix_s, leader_token)
        return Ticket(expires_unix_s=expires_unix_s, mac=mac, leader_token=leader_token)

    def check(self, claim: Claim, ticket: Ticket | None) -> None:
        """Raises Forbidden where the ticket is missing, not for this claim, or over.

        Raises StaleLeader where a scheduler signed it that was replaced since.
        """
        if ticket is None:
            raise Forbidden(f"no ticket for {claim.right.value}")
        mac = self._mac(claim, ticket.expires_unix_s, ticket.leader_token)
        if not hmac.compare_digest(ticket.mac, mac):
            raise Forbidden(f"the ticket is not for this {claim.right.value}")
        if ticket.expires_unix_s + _CLOCK_SKEW_S < self._now_s():
            raise Forbidden(f"the ticket for {claim.right.value} is over")
        if self._fence is not None and claim.right is Right.HANDOFF:
            self._fence.admit(ticket.leader_token)

    def _mac(self, claim: Claim, expires_unix_s: float, leader_token: int) -> bytes:
        signed = leader_token.to_bytes(8, "big", signed=True) + claim.encoded(expires_unix_s)
        return hmac.digest(self._secret, signed, "sha256")


def secret_for_cluster(secret_file: str | None) -> bytes:
    """The operator's secret, from its file or the environment; else a fresh random one.

    Raises ConfigError where the file cannot be read or the secret is too short.
    """
    if secret_file is not None:
        try:
            secret = Path(secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"cannot read {secret_file}: {error.strerror}") from error
    elif (variable := os.environ.get(SECRET_VARIABLE)) is not None:
        secret = variable.encode()
    else:
        return secrets.token_bytes(32)
    Tickets(secret)
    return secret


def store_secret(run_dir: Path, secret: bytes) -> None:
    """Writes the secret where the cluster's processes read it; its user alone can."""
    file = os.open(run_dir / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(secret)


def load_secret(run_dir: Path) -> bytes:
    """Reads what `store_secret` wrote."""
    return (run_dir / SECRET_FILE).read_bytes()
