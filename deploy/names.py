"""Names of processes that no launcher numbers."""

import re
import socket

from core.errors import ConfigError

# A name is part of file names and of labels.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", re.ASCII)


def process_name(role: str, given: str | None) -> str:
    """The name that was given, else the role and this machine's name.

    Raises ConfigError where it is none: up to 63 of a-z, 0-9, dots and hyphens.
    """
    if given is None:
        host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
        given = f"{role}-{host}"[:63].rstrip("-")
    if _NAME.fullmatch(given) is None:
        raise ConfigError(
            f"--name {given!r}: a name has 1 to 63 of a-z, 0-9, '.' and '-', and begins and ends "
            "with a letter or digit"
        )
    return given
