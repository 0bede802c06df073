"""The life of one process of the cluster: how it starts, is told to stop, and ends.

The launcher starts `python -m ROLE --run-dir DIR --name NAME --incarnation ID`, and a worker with
`--model NAME`. The process prints nothing on stdout, logs to stderr, and tells that it serves by
creating its ready file in the run directory. SIGTERM and SIGINT ask it to drain and end; the death
of its launcher does the same, so that no process outlives its cluster.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from core import rpc
from core.config import ClusterConfig
from core.errors import ConfigError
from core.fence import Fence
from core.internal_tls import InternalTls
from core.messages import WorkerRef
from core.model_card import ModelCard
from core.run_dir import await_launcher_death, join, remove_if_abandoned
from core.served_models import ServedModel, load_served, model_named
from core.telemetry.names import Role
from core.telemetry.setup import tracing
from core.telemetry.tracer import NO_TRACER, Tracer

BEAT_S = 1.0
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: restarting will not help
EXIT_BROKEN = 71  # EX_OSERR: what it cannot work without is gone; a new life may have it
EXIT_STUCK = 70  # EX_SOFTWARE: asked to stop, and did not within its time
# Beyond the time for draining, a process may take this long to let go of what it holds.
STOP_GRACE_S = 5.0
SCHEDULER_NAME = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessContext:
    """What a process is told at its start.

    A worker serves one model, and `config` is what a cluster of that one alone would be told; to
    gateway and scheduler it is the whole cluster's.
    """

    run_dir: Path
    me: WorkerRef
    cluster: ClusterConfig
    config: ClusterConfig
    # Those that this process serves.
    models: tuple[ServedModel, ...]
    tracer: Tracer = NO_TRACER
    # What kind of process it is, for a collector; None where it tells none.
    role: Role | None = None
    # Which leaders this process obeys; a scheduler: under which token it leads.
    fence: Fence = field(default_factory=Fence)
    # None: the others are met at Unix sockets, or over TCP as it is.
    tls: InternalTls | None = None

    @property
    def dial(self) -> rpc.Dial:
        """How this process calls the others."""
        return rpc.channel if self.tls is None else self.tls.channel

    @property
    def card(self) -> ModelCard:
        """The card of a worker's model."""
        return self.models[0].card

    @property
    def model_names(self) -> str:
        """What this process serves, in one word where it is one."""
        return ",".join(model.name for model in self.models)

    def mark_ready(self) -> None:
        """Tells the launcher that this process serves."""
        ready_file(self.run_dir, self.me).touch()


def die(why: str) -> None:
    """Ends this process at once, from any thread, with a line that says why.

    What it leaves, its launcher clears away, as after a crash.
    """
    print(f"ended: {why}", file=sys.stderr, flush=True)
    os._exit(EXIT_BROKEN)


def socket_address(run_dir: Path, worker: WorkerRef) -> str:
    """The Unix socket of a process. The run directory is its user's alone (0700)."""
    return f"unix:{run_dir}/{worker.name}-{worker.incarnation}.sock"


def ready_file(run_dir: Path, worker: WorkerRef) -> Path:
    """Exists while the process of this incarnation serves."""
    return run_dir / f"{worker.name}-{worker.incarnation}.ready"


def arguments(run_dir: Path, me: WorkerRef, model: str | None = None) -> list[str]:
    """The command-line arguments that `run` reads."""
    named = ["--run-dir", str(run_dir), "--name", me.name, "--incarnation", me.incarnation]
    return named if model is None else [*named, "--model", model]


def run(main: Callable[[ProcessContext, asyncio.Event], Awaitable[None]], role: Role) -> None:
    """The whole body of a role's `__main__`: parses, watches signals and launcher, runs `main`.

    `main(context, stop)` serves until `stop` is set, drains and returns; what it traced is sent
    then. A ConfigError ends the
    process with one line and EXIT_CONFIG.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--model")
    args = parser.parse_args()
    me = WorkerRef(name=args.name, incarnation=args.incarnation)
    try:
        membership = join(args.run_dir)
    except OSError:
        sys.exit(f"{me.name}: {args.run_dir} is gone, and the launcher with it")

    def leave() -> None:
        _leave(args.run_dir, me, membership)

    try:
        cluster = ClusterConfig.load(args.run_dir)
        models = load_served(cluster, args.run_dir)
        config = cluster
        if role in (Role.PREFILL_WORKER, Role.DECODE_WORKER):
            mine = model_named(models, args.model)
            models, config = (mine,), mine.config
        context = ProcessContext(
            run_dir=args.run_dir,
            me=me,
            cluster=cluster,
            config=config,
            models=models,
            tls=InternalTls.of(cluster.internal_tls),
        )
        with tracing(context.config.telemetry, role, me) as tracer:
            asyncio.run(_supervised(main, replace(context, tracer=tracer, role=role), leave))
    except (ConfigError, BaseExceptionGroup) as error:
        print(f"{me.name}: {_config_error_in(error).message}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG)
    finally:
        leave()


def _config_error_in(error: BaseException) -> ConfigError:
    """The ConfigError itself, or the first inside the group that a TaskGroup made of it.

    Raises the group where there is none.
    """
    while isinstance(error, BaseExceptionGroup):
        inner = error.subgroup(ConfigError)
        if inner is None:
            raise error
        error = inner.exceptions[0]
    assert isinstance(error, ConfigError)
    return error


async def _supervised(
    main: Callable[[ProcessContext, asyncio.Event], Awaitable[None]],
    context: ProcessContext,
    leave: Callable[[], None],
) -> None:
    stop = asyncio.Event()

    def give_up() -> None:
        print(f"{context.me.name}: did not stop in time", file=sys.stderr, flush=True)
        leave()
        os._exit(EXIT_STUCK)

    # A thread: it must fire where the event loop is what hangs. Nobody else ends a process whose
    # launcher is gone.
    fuse = threading.Timer(context.config.stop_s + STOP_GRACE_S, give_up)
    fuse.daemon = True

    def ask_to_stop() -> None:
        if not stop.is_set():
            fuse.start()
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask_to_stop)
    _on_launcher_death(context.run_dir, loop, ask_to_stop)
    beating = asyncio.create_task(_beat(ready_file(context.run_dir, context.me)))
    try:
        await main(context, stop)
    finally:
        beating.cancel()


async def _beat(file: Path) -> None:
    """Touches the ready file every second: the launcher sees that the event loop turns."""
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(FileNotFoundError):  # not ready yet
            os.utime(file)


def _on_launcher_death(
    run_dir: Path, loop: asyncio.AbstractEventLoop, ask_to_stop: Callable[[], None]
) -> None:
    """A thread that sleeps in the kernel until the launcher's lock falls."""

    def watch() -> None:
        await_launcher_death(run_dir)
        with contextlib.suppress(RuntimeError):  # this process has ended its loop by itself
            loop.call_soon_threadsafe(ask_to_stop)

    threading.Thread(target=watch, name="watch the launcher", daemon=True).start()


def remove_files(run_dir: Path, worker: WorkerRef) -> None:
    """Removes what tells of a process that has ended: its ready file and its sockets."""
    ready_file(run_dir, worker).unlink(missing_ok=True)
    Path(socket_address(run_dir, worker).removeprefix("unix:")).unlink(missing_ok=True)
    if worker.name.partition("-")[0] == SCHEDULER_NAME:
        (run_dir / f"{worker.name}.sock").unlink(missing_ok=True)


def _leave(run_dir: Path, me: WorkerRef, membership: int) -> None:
    """Removes this process's files, and the run directory too where nobody else is left."""
    remove_files(run_dir, me)
    remove_if_abandoned(run_dir, membership)
