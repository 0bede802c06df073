"""A gateway in the model: what it has asked of a decode worker, and what it was told."""

from collections import deque


class Port:
    """As `decode_worker.gateway_port.GatewayPort`: one gateway's stream to one decode worker."""

    def __init__(self, world, worker):
        self.world = world
        self.worker = worker
        self.orders = deque()  # what the gateway said and the worker has not heard
        self.running = set()
        self.up = True

    def ended(self, transfer, outcome):
        if self.up:
            self.world.outcomes[transfer].append(outcome)
            self.running.discard(transfer)

    def lose(self):
        """The gateway's end of the stream is gone: it tells its clients so."""
        self.up = False
        for transfer in sorted(self.running, key=str):
            self.world.outcomes[transfer].append("lost")
        self.running.clear()
        self.orders.clear()
