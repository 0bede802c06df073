"""Starting a NIXL agent: the package, which is optional, and the settings of UCX under it."""

import contextlib
import importlib
import os
import secrets
from pathlib import Path
from typing import Any

from core.errors import Unavailable
from core.messages import WorkerRef

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")


def start_agent(owner: WorkerRef, *, loopback: bool) -> Any:
    """A NIXL agent that only moves when it is asked to: its own thread would spin on a core.

    `loopback` keeps it off every other network. Raises Unavailable where the package is missing or
    UCX does not start.
    """
    # Where UCX finds no RDMA device, its other choices fail; settings of the operator's win.
    if not any(Path("/sys/class/infiniband").glob("*")):
        os.environ.setdefault("UCX_TLS", "tcp")
        if loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it would print on stdout
    for module in _MODULES:
        with contextlib.suppress(ImportError):
            api: Any = importlib.import_module(module)
            break
    else:
        raise Unavailable("the nixl package is not installed")
    try:
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            backends=["UCX"],
        )
        return api.nixl_agent(f"{owner}-{secrets.token_hex(4)}", config)
    except Exception as error:  # its errors share no base class
        raise Unavailable(f"NIXL did not start: {error}") from error
