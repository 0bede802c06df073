"""A rank that is not the first: `python -m engine.parallel.follower FD`, started by the first.

It does what comes through the pipe, one thing after another, and ends with it. It owns no request
and no block: what it computes, and where, is in each message.
"""

import os
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import structlog
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from core.errors import ConfigError
from engine.kv_cache import KvCache, PoolMemory
from engine.llama import LlamaModel
from engine.loader import load_engine_model
from engine.parallel.group import RankGroup
from engine.parallel.messages import Begin, Done, Pool
from engine.runner import ModelRunner

_FAILED = 1


def main() -> None:
    """Serves the first rank until it is gone."""
    pipe = Connection(int(sys.argv[1]))
    # Whoever stops the whole group stops the first rank, which drains, and then ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    watch = threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True)
    watch.start()
    try:
        _serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(_FAILED)  # at once: a collective's own threads may hang


def _end_with(pipe: int) -> None:
    """Ends this process with the other end of the pipe, whatever the main thread is caught in."""
    poll = select.poll()
    poll.register(pipe, 0)  # its end is told unasked
    poll.poll()
    os._exit(0)


def _serve(pipe: Connection) -> None:
    pipe.send(Done())
    begin: Begin = pipe.recv()
    torch.set_num_threads(begin.threads)
    group = RankGroup(FileStore(begin.store, begin.shard.ranks), begin.shard, torch.device("cpu"))
    try:
        model = load_engine_model(begin.card, begin.config, group=group).model
    except ConfigError as error:
        pipe.send(Done(refused=error.message))
        pipe.recv()  # the end
        return
    pipe.send(Done())
    runner = ModelRunner(model, _pool(pipe, begin, model))
    pipe.send(Done())
    while True:
        runner.follow(pipe.recv())


def _pool(pipe: Connection, begin: Begin, model: LlamaModel) -> KvCache:
    pool: Pool = pipe.recv()
    memory = PoolMemory.mapped(recv_handle(pipe), pool.offset, pool.spec.kv_bytes)
    return KvCache(pool.spec, memory.buffer, rank=begin.shard.rank)


if __name__ == "__main__":
    main()
