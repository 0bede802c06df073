"""A real `redis-server` of its own, on a Unix socket, to be frozen, filled and killed."""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BINARY = shutil.which("redis-server")
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0
_REPLY_TIMEOUT_S = 5.0
_POLL_S = 0.02


class RedisServer:
    """One server that keeps nothing on disk. `url` stays the same over its lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        assert BINARY is not None
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(BINARY, "--port", "0", "--unixsocket", str(self._socket)),
                    *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if self.say("PING") == b"+PONG\r\n":
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._folder / "redis.log").read_text()[-2000:])
            time.sleep(_POLL_S)

    def say(self, *words: str) -> bytes:
        """Sends one command and gives the reply's first bytes, as Redis' protocol has them."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_REPLY_TIMEOUT_S)
            connection.connect(str(self._socket))
            body = b"".join(b"$%d\r\n%s\r\n" % (len(w.encode()), w.encode()) for w in words)
            connection.sendall(b"*%d\r\n%s" % (len(words), body))
            return connection.recv(65536)

    def freeze(self) -> None:
        """It stops, and its connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone, with all that it held."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(_STOP_TIMEOUT_S)
            self._process = None
        self._socket.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that runs until the block ends."""
    with tempfile.TemporaryDirectory(prefix="r-") as folder:  # short, as a socket's path must be
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
