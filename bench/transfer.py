"""How fast KV blocks move, beside the plainest copy of the same bytes measured in the same run.

`python -m bench.transfer` sends the KV of 512 and of 2048 prompt tokens, shaped as SmolLM2-135M's,
from this process to another over each transport that works here. Each round measures three things
one after the other, so that all meet the same machine: a memory copy, a bare loopback socket
between the same two processes, and the transport, from the first write to the receiver's word that
all has arrived (for `shm` to the last write, after which all has landed). Ends with one JSON line.
"""

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import structlog

from bench.exposed import measure_exposed
from core.config import TransferConfig
from core.errors import TandemError
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer import shm
from kv_transfer.digest import Blocks, block_digests
from kv_transfer.transport import BlockReceiver, BlockSender, connect, make_receivers

TRANSPORTS = ("shm", "tcp", "collective", "nixl")
PROMPT_TOKENS = (512, 2048)
BLOCK_TOKENS = 16
# [30 layers, 2, 16 tokens, 3 heads, 64] in bfloat16.
BLOCK_BYTES = 30 * 2 * BLOCK_TOKENS * 3 * 64 * 2
NUM_BLOCKS = max(PROMPT_TOKENS) // BLOCK_TOKENS
TTFT_S = 0.9  # of a 512-token prompt on one core, for the digest's share
_SENDER = WorkerRef(name="prefill-bench", incarnation="0")
_RECEIVER = WorkerRef(name="decode-bench", incarnation="0")
_TICKETS = Tickets(b"the benchmark's own secret")
_TIMEOUT_S = 60.0
_RECV_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians of one transport and one size; `ratio` is that of the rounds' own ratios."""

    tokens: int
    gb_per_s: float
    baseline: str
    baseline_gb_per_s: float
    ratio: float


class Receiver:
    """The other process: serves one transport at a time, and the bare socket."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._pool = _pool()
        self._segment: shm.Segment | None = None
        self._receiver: BlockReceiver | None = None
        self._num_transfers = 0
        self._loop = asyncio.new_event_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            control.send(server.getsockname()[1])
            self._bare, _ = server.accept()

    def run(self) -> None:
        """Answers until told to end."""
        operations: dict[str, Callable[[int], object]] = {
            "bare": self._take_bare,
            "open": self._open,
            "await": self._await,
            "nothing": lambda _: None,
        }
        while True:
            operation, argument = self._control.recv()
            if operation == "end":
                self._loop.close()
                return
            if operation == "serve":
                self._control.send(self._serve(argument))
            elif operation == "close":
                self._close()
            else:
                self._control.send(operations[operation](argument))

    def _serve(self, name: str) -> TransportOffer | str:
        pool = self._pool
        try:
            if name == shm.NAME:
                self._segment = shm.Segment.create(_RECEIVER, NUM_BLOCKS, BLOCK_BYTES)
                pool = self._segment.bytes
                pool[:] = 1  # its pages are there from now on
            made = make_receivers(name, _RECEIVER, pool, self._segment, TransferConfig(), _TICKETS)
        except TandemError as error:
            return error.message
        self._receiver = made[name]
        return self._receiver.offer(_SENDER)

    def _take_bare(self, num_bytes: int) -> None:
        self._control.send(None)  # ready
        place = self._pool.reshape(-1).data
        taken = 0
        while taken < num_bytes:
            wanted = min(_RECV_BYTES, num_bytes - taken)
            taken += self._bare.recv_into(place[taken:], wanted)

    def _open(self, num_blocks: int) -> TransferId:
        assert self._receiver is not None
        self._num_transfers += 1
        self._transfer = TransferId(request_id=f"bench-{self._num_transfers:030}", attempt=1)
        self._receiver.open(self._transfer, range(num_blocks))
        return self._transfer

    def _await(self, _: int) -> bool:
        assert self._receiver is not None
        arriving = self._receiver.arrived(self._transfer, timeout_s=_TIMEOUT_S)
        arrived = self._loop.run_until_complete(arriving)
        self._receiver.revoke(self._transfer)
        return arrived

    def _close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _receive(control: Connection) -> None:
    _quiet()
    Receiver(control).run()


def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


class Sender:
    """This process: takes the times."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        port = control.recv()
        self._bare = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self._bare.settimeout(None)
        self.pool = _pool()
        self.pool[:] = np.random.default_rng(0).integers(0, 256, self.pool.shape, dtype=np.uint8)
        self._copy = _pool()

    def measure(self, name: str, rounds: int) -> list[Speed] | str:
        """The transport at each size, or why it does not work here."""
        offer = self._ask("serve", name)
        if isinstance(offer, str):
            return offer
        assert isinstance(offer, TransportOffer)
        try:
            sender = connect([offer], _SENDER, _RECEIVER, _TICKETS)
        except TandemError as error:
            return error.message
        try:
            return [self._speed(sender, tokens, rounds) for tokens in PROMPT_TOKENS]
        finally:
            sender.close()
            self._control.send(("close", None))

    def digest_s(self, rounds: int) -> float:
        """Seconds for the digests of 512 tokens' blocks, on one side."""
        blocks = range(PROMPT_TOKENS[0] // BLOCK_TOKENS)
        transfer = TransferId(request_id="bench", attempt=1)
        return _median(lambda: block_digests(transfer, self.pool, blocks), rounds)

    def _speed(self, sender: BlockSender, tokens: int, rounds: int) -> Speed:
        num_blocks = tokens // BLOCK_TOKENS
        num_bytes = num_blocks * BLOCK_BYTES
        plain = self._memcpy if sender.name == shm.NAME else self._socket
        times = []
        for _ in range(rounds + 2):  # the first two warm caches and connections up
            times.append((plain(num_blocks), self._transfer(sender, num_blocks)))
        times = times[2:]
        plain_s = statistics.median(baseline for baseline, _ in times)
        moved_s = statistics.median(moved for _, moved in times)
        return Speed(
            tokens=tokens,
            gb_per_s=round(num_bytes / moved_s / 1e9, 3),
            baseline="memcpy" if sender.name == shm.NAME else "socket",
            baseline_gb_per_s=round(num_bytes / plain_s / 1e9, 3),
            ratio=round(statistics.median(baseline / moved for baseline, moved in times), 3),
        )

    def _transfer(self, sender: BlockSender, num_blocks: int) -> float:
        transfer = self._ask("open", num_blocks)
        assert isinstance(transfer, TransferId)
        if sender.name != shm.NAME:
            self._control.send(("await", 0))
        started_s = time.perf_counter()
        for index in range(num_blocks):
            sender.write(transfer, index, index, 0, self.pool[index])
        sender.flush(timeout_s=_TIMEOUT_S)
        if sender.name == shm.NAME:
            return time.perf_counter() - started_s
        arrived = self._control.recv()
        took_s = time.perf_counter() - started_s
        if not arrived:
            raise SystemExit(f"{sender.name}: blocks did not arrive within {_TIMEOUT_S} s")
        return took_s

    def _memcpy(self, num_blocks: int) -> float:
        self._ask("nothing", 0)  # to begin as the transport does: just woken by the other process
        started_s = time.perf_counter()
        np.copyto(self._copy[:num_blocks], self.pool[:num_blocks])
        return time.perf_counter() - started_s

    def _socket(self, num_blocks: int) -> float:
        data = self.pool[:num_blocks].reshape(-1).data
        self._ask("bare", data.nbytes)
        started_s = time.perf_counter()
        self._bare.sendall(data)
        self._control.recv()  # taken
        return time.perf_counter() - started_s

    def _ask(self, operation: str, argument: object) -> object:
        self._control.send((operation, argument))
        return self._control.recv()


def _pool() -> Blocks:
    """Memory as a worker's own pool is: an anonymous mapping, here with all its pages in place.

    An array of numpy's own would have huge pages, which shared memory mostly has not: copies into
    it measure up to a third faster for that alone.
    """
    mapped = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = np.frombuffer(mapped, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    pool[:] = 1
    return pool


def _median(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def main() -> None:
    """Measures, prints a line for each size, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds of each size")
    parser.add_argument("--no-cluster", action="store_true", help="leave the exposed time out")
    args = parser.parse_args()
    rounds = args.rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    _quiet()
    processes = multiprocessing.get_context("spawn")
    control, far = processes.Pipe()
    receiver = processes.Process(target=_receive, args=(far,))
    receiver.start()
    far.close()  # so that the receiver's death ends a wait for its answer
    try:
        sender = Sender(control)
        speeds: dict[str, list[Speed]] = {}
        skipped: dict[str, str] = {}
        for name in TRANSPORTS:
            measured = sender.measure(name, rounds)
            if isinstance(measured, str):
                skipped[name] = measured
                print(f"{name:<11} skipped: {measured}")
                continue
            speeds[name] = measured
            for speed in measured:
                print(
                    f"{name:<11} {speed.tokens:>5} tokens  {speed.gb_per_s:7.3f} GB/s   "
                    f"{speed.baseline} {speed.baseline_gb_per_s:7.3f} GB/s   "
                    f"{100 * speed.ratio:5.1f}%"
                )
        digest_s = sender.digest_s(rounds)
        control.send(("end", None))
    finally:
        receiver.join(timeout=10)
        receiver.kill()
    num_bytes = PROMPT_TOKENS[0] // BLOCK_TOKENS * BLOCK_BYTES
    share = 2 * digest_s / TTFT_S
    print(
        f"digests: {num_bytes} bytes of {PROMPT_TOKENS[0]} tokens in {1e3 * digest_s:.3f} ms "
        f"({num_bytes / digest_s / 1e9:.1f} GB/s), at the sender and again at the receiver: "
        f"2 x {1e3 * digest_s:.3f} ms / {1e3 * TTFT_S:.0f} ms of TTFT = {100 * share:.2f}%"
    )
    exposed = [] if args.no_cluster else measure_exposed(shm.NAME, rounds)
    for each in exposed:
        print(
            f"exposed over shm: {each.tokens} tokens, TTFT {each.ttft_ms:.0f} ms, of it transfer "
            f"tail {each.transfer_tail_ms:.1f} ms and adoption {each.adopt_ms:.1f} ms: "
            f"{100 * each.share:.2f}%"
        )
    result = {
        "block_bytes": BLOCK_BYTES,
        "rounds": rounds,
        "load_1m": round(os.getloadavg()[0], 2),
        "transports": {name: [asdict(s) for s in measured] for name, measured in speeds.items()},
        "skipped": skipped,
        "exposed": [asdict(each) for each in exposed],
        "digest": {
            "gb_per_s": round(num_bytes / digest_s / 1e9, 3),
            "seconds_of_512_tokens": round(digest_s, 6),
            "share_of_ttft": round(share, 5),
            "ttft_s": TTFT_S,
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
