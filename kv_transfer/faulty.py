"""The `faulty` transport: any sender that breaks on purpose, the same way for the same seed.

A specification is a list of `name=value`: `seed=7,drop=0.02,corrupt=0.02,freeze=0.001`. A fault's
value is its probability per write; `delay_s` and `stall_s` say how long those two take. Every fault
is logged as one line `fault_injected`, before it happens, so that a test can count what should have
been detected.
"""

import collections
import dataclasses
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import structlog

from core.errors import ConfigError
from core.messages import TransferId
from kv_transfer.digest import Blocks

if TYPE_CHECKING:
    from kv_transfer.transport import BlockSender

_Piece = tuple[TransferId, int, int, int, Blocks]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """How often each fault happens, as a probability per write."""

    seed: int = 0
    kill: float = 0.0  # SIGKILL to this process just before the copy
    freeze: float = 0.0  # SIGSTOP to this process just before the copy
    stall: float = 0.0  # sleep for `stall_s`
    delay: float = 0.0  # sleep for `delay_s`
    drop: float = 0.0  # write nothing
    truncate: float = 0.0  # write the first half
    corrupt: float = 0.0  # flip one byte
    duplicate: float = 0.0  # write twice
    reorder: float = 0.0  # write after the next piece
    delay_s: float = 0.005
    stall_s: float = 1.0

    @classmethod
    def parse(cls, spec: str) -> "FaultSpec":
        """Raises ConfigError for an unknown name, or a value out of range."""
        values: dict[str, int | float] = {}
        for part in spec.split(","):
            name, _, text = part.strip().partition("=")
            known = {field.name for field in dataclasses.fields(cls)}
            if name not in known:
                raise ConfigError(
                    f"transfer.faults: {name!r} is none of {', '.join(sorted(known))}"
                )
            try:
                values[name] = int(text) if name == "seed" else float(text)
            except ValueError as error:
                raise ConfigError(
                    f"transfer.faults: {name} needs a number, not {text!r}"
                ) from error
            limit = 1.0 if name in KINDS else 3600.0
            if name != "seed" and not 0.0 <= values[name] <= limit:
                raise ConfigError(f"transfer.faults: {name} must be from 0 to {limit:g}")
        return cls(**values)  # type: ignore[arg-type]


# In the order in which one write's faults are drawn and happen.
KINDS = (
    *("kill", "freeze", "stall", "delay", "drop"),
    *("truncate", "corrupt", "duplicate", "reorder"),
)


class FaultySender:
    """Wraps a sender. Each write draws once for each kind: one kind's odds shift no other's."""

    def __init__(self, sender: "BlockSender", spec: str, *, stream: str = "") -> None:
        """`stream` tells pairs of one seed apart. Raises ConfigError for a bad specification."""
        self._sender = sender
        self._spec = FaultSpec.parse(spec)
        self._random = random.Random(f"{self._spec.seed}/{stream}")
        self._held: _Piece | None = None
        self._log = structlog.get_logger()
        self.injected: collections.Counter[str] = collections.Counter()

    @property
    def name(self) -> str:
        return self._sender.name

    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None:
        """Writes the piece, or what the faults make of it."""
        odds: dict[str, float] = {kind: getattr(self._spec, kind) for kind in KINDS}
        happens = {kind: self._random.random() < p for kind, p in odds.items()}
        position, bit = self._random.random(), 1 << self._random.randrange(8)

        def inject(kind: str) -> bool:
            if happens[kind]:
                self.injected[kind] += 1
                self._log.warning("fault_injected", kind=kind, transfer=str(transfer), index=index)
            return happens[kind]

        # To this thread: sent to the process, it may take effect after the copy.
        if inject("kill"):
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL)
        if inject("freeze"):
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        if inject("stall"):
            time.sleep(self._spec.stall_s)
        if inject("delay"):
            time.sleep(self._spec.delay_s)
        if inject("drop"):
            self._release()
            return
        if inject("truncate"):
            data = data[: data.nbytes // 2]
        if data.nbytes and inject("corrupt"):
            data = data.copy()
            data[int(position * data.nbytes)] ^= bit
        if not data.nbytes:
            self._release()
            return
        piece = (transfer, index, target, offset, data)
        repeats = 2 if inject("duplicate") else 1
        if self._held is None and inject("reorder"):
            self._held = piece
            return
        for _ in range(repeats):
            self._sender.write(*piece)
        self._release()

    def flush(self, *, timeout_s: float) -> None:
        """Writes what was held back, then flushes."""
        self._release()
        self._sender.flush(timeout_s=timeout_s)

    def close(self) -> None:
        """Closes the sender; what was held back is never written. Idempotent."""
        self._held = None
        self._sender.close()

    def _release(self) -> None:
        if (piece := self._held) is not None:
            self._held = None
            self._sender.write(*piece)
