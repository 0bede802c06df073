"""The run directory: made for one cluster, seen by its processes alone, gone with it."""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from core.config import CLUSTER_FILE, ClusterConfig
from core.errors import ConfigError, Unavailable
from core.model_settings import MAX_MODELS
from core.ports import told_ports
from core.run_dir import LAUNCHER_FILE, claim, remove_if_abandoned
from core.served_models import card_link
from core.tickets import secret_for_cluster, store_secret

_PREFIX = "tandem-"
# Not yet claimed. Nobody takes such a directory for an orphan before it is this old.
_UNCLAIMED_PREFIX = ".tandem-"
_UNCLAIMED_S = 60.0
# A Unix socket's path has at most 103 bytes on macOS; this is the longest name of ours.
_MAX_SOCKET_PATH = 103
_LONGEST_NAME = "/tandem-12345678/prefill-63-12345678.sock"


class RunDir:
    """A claimed run directory. `close` removes it."""

    def __init__(self, path: Path, claim_fd: int) -> None:
        self.path = path
        self._claim_fd = claim_fd

    @classmethod
    def create(cls, config: ClusterConfig, card_folders: Sequence[Path]) -> "RunDir":
        """Makes it (mode 0700) with the configuration and links to the models' cards.

        It gets its name only once it is claimed, so that another launcher never finds it unclaimed
        and takes it for an orphan. Raises ConfigError where there is no folder to make it in.
        """
        secret = secret_for_cluster(config.secret_file)
        parent = _parent()
        unclaimed = Path(tempfile.mkdtemp(prefix=_UNCLAIMED_PREFIX, dir=parent))
        claim_fd = claim(unclaimed)
        config.store(unclaimed)
        store_secret(unclaimed, secret)
        for number, folder in enumerate(card_folders):
            (unclaimed / card_link(number)).symlink_to(folder)
        path = parent / f"{_PREFIX}{unclaimed.name.removeprefix(_UNCLAIMED_PREFIX)}"
        return cls(unclaimed.rename(path), claim_fd)

    def bound(self, process: str) -> dict[str, int]:
        """The ports that a process says it has bound. Raises Unavailable where it says none."""
        ports = told_ports(self.path, process)
        if not ports:
            raise Unavailable(f"{process} does not say where it listens")
        return ports

    def close(self) -> None:
        """Removes the directory. Idempotent."""
        if self._claim_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._claim_fd)
            self._claim_fd = -1


def reap_abandoned() -> list[str]:
    """Removes the run directories of launchers that are gone; gives the names removed."""
    reaped = []
    for parent in _candidates():
        for path in parent.glob(f"{_PREFIX}*"):
            # People have folders of such names too. Every run directory has this file.
            if _is_ours(path) and (path / LAUNCHER_FILE).exists() and remove_if_abandoned(path):
                reaped.append(path.name)
        for path in parent.glob(f"{_UNCLAIMED_PREFIX}*"):
            if _is_ours(path) and _was_given_up(path):
                shutil.rmtree(path, ignore_errors=True)
                reaped.append(path.name)
    return reaped


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _was_given_up(unclaimed: Path) -> bool:
    """Whether a launcher died while it made this directory."""
    old = time.time() - unclaimed.stat().st_mtime > _UNCLAIMED_S
    known = {LAUNCHER_FILE, CLUSTER_FILE, f"{CLUSTER_FILE}.partial"}
    known |= {card_link(number) for number in range(MAX_MODELS)}
    return old and {path.name for path in unclaimed.iterdir()} <= known


def _candidates() -> list[Path]:
    """Folders that may hold run directories, the best first."""
    named = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir())
    found = [Path(name) for name in named if name]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _parent() -> Path:
    for folder in _candidates():
        fits = len(os.fsencode(folder)) + len(_LONGEST_NAME) <= _MAX_SOCKET_PATH
        if fits and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ConfigError(
        "no folder for Unix sockets: XDG_RUNTIME_DIR or TMPDIR must name one that can be written "
        f"to, with a path of at most {_MAX_SOCKET_PATH - len(_LONGEST_NAME)} bytes"
    )
