"""Has the model's card made, by a process of its own: the launcher stays light."""

import asyncio
import contextlib
import sys
from pathlib import Path

from core.errors import ConfigError
from deploy.environment import command, light

_CHUNK_BYTES = 4096


async def prepare_card(model: str, module: str) -> Path:
    """The folder of the model's card, made or found in the cache. Progress shows on stderr.

    Raises ConfigError with the last line that the process said where it fails. There is no
    deadline: a download takes what it takes, its progress is on view, and cancelling ends it.
    """
    process = await asyncio.create_subprocess_exec(
        *command(module, model),
        env=light(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        said, last = await asyncio.gather(process.stdout.read(), _pass_on(process.stderr))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code != 0:
        why = last.decode(errors="replace").strip()
        raise ConfigError(why or f"model {model}: cannot be prepared (exit code {code})")
    _show(last)
    lines = said.decode().splitlines()
    if not lines:
        raise ConfigError(f"model {model}: {module} named no card")
    return Path(lines[-1])


async def _pass_on(stream: asyncio.StreamReader) -> bytes:
    """Shows what comes, except the last line, which is returned: it may be the error."""
    held = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        held += chunk
        body = held.rstrip(b"\r\n")
        # A progress bar ends its lines with a carriage return.
        cut = max(body.rfind(b"\n"), body.rfind(b"\r")) + 1
        _show(held[:cut])
        held = held[cut:]
    return held


def _show(text: bytes) -> None:
    sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()
