"""A worker's end of a transport in a process of its own, driven by JSON lines; see conftest.py.

One line in is one operation, one line out its result or the error that it raised. Bytes are made
from a seed on both sides.
"""

import asyncio
import importlib
import json
import sys
import threading
import time

import numpy as np
import structlog

from core.config import TransferConfig
from core.errors import TandemError
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer.transport import connect, make_receivers

SENDERS = {"tcp": "TcpSender", "collective": "CollectiveSender", "nixl": "NixlSender"}


def blocks_of(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def worker(pair):
    return WorkerRef(name=pair[0], incarnation=pair[1])


def offer_of(fields):
    return TransportOffer(
        name=fields["name"], address=fields["address"], payload=bytes.fromhex(fields["payload"])
    )


class Peer:
    def __init__(self):
        self.senders = {}
        self.receiver = None

    def serve(self, transport, me, writer, secret, num_blocks, block_bytes):
        """Makes a receiver, opens one transfer for all its blocks, and gives the offer."""
        self.pool = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        made = make_receivers(
            transport, worker(me), self.pool, None, TransferConfig(), Tickets(bytes.fromhex(secret))
        )
        self.receiver = made[transport]
        transfer = TransferId(request_id="request", attempt=1)
        self.receiver.open(transfer, range(num_blocks))
        offer = self.receiver.offer(worker(writer))
        return {"name": offer.name, "address": offer.address, "payload": offer.payload.hex()}

    def connect(self, id, offers, me, peer, secret, faults="", write_timeout_s=None):
        tickets = Tickets(bytes.fromhex(secret))
        offers = [offer_of(fields) for fields in offers]
        if write_timeout_s is None:
            sender = connect(offers, worker(me), worker(peer), tickets, faults=faults)
        else:
            module = importlib.import_module(f"kv_transfer.{offers[0].name}")
            make = getattr(module, SENDERS[offers[0].name])
            sender = make(
                offers[0], worker(me), worker(peer), tickets, write_timeout_s=write_timeout_s
            )
        self.senders[id] = sender
        return sender.name

    def write(self, id, transfer, index, target, seed, offset=0, size=None, block_bytes=None):
        data = blocks_of(seed, block_bytes)[offset : offset + (size or block_bytes)]
        self.senders[id].write(
            TransferId(request_id=transfer[0], attempt=transfer[1]), index, target, offset, data
        )

    def write_at_once(self, jobs):
        """Each job is the arguments of `write`, and has a thread; all begin together."""
        begin, errors = threading.Barrier(len(jobs)), []

        def run(job):
            begin.wait(timeout=10)
            try:
                self.write(**job)
                self.senders[job["id"]].flush(timeout_s=10)
            except TandemError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        return errors

    def write_until_lost(self, id, block_bytes, for_s):
        """Writes block 0 again and again; gives the seconds that the last, failing call took."""
        end = time.monotonic() + for_s
        data = blocks_of(1, block_bytes)
        transfer = TransferId(request_id="request", attempt=1)
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                self.senders[id].write(transfer, 0, 0, 0, data)
                self.senders[id].flush(timeout_s=1.0)
            except TandemError as error:
                return {"error": type(error).__name__, "after_s": time.monotonic() - began}
        return {"error": None, "after_s": for_s}

    def flush(self, id, timeout_s=10):
        self.senders[id].flush(timeout_s=timeout_s)

    def close(self, id):
        sender = self.senders.pop(id)
        sender.close()
        sender.close()

    def arrived(self, timeout_s):
        transfer = TransferId(request_id="request", attempt=1)
        return asyncio.run(self.receiver.arrived(transfer, timeout_s=timeout_s))


def main():
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    peer = Peer()
    for line in sys.stdin:
        operation, arguments = json.loads(line)
        try:
            result = {"result": getattr(peer, operation)(**arguments)}
        except TandemError as error:
            result = {"error": type(error).__name__, "message": error.message}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
