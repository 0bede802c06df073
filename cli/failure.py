"""How a command that failed ends: what it says, and its exit code."""

import sys

from core.errors import ConfigError, TandemError
from core.process import EXIT_CONFIG
from deploy.child import ChildRefused


def exit_code(error: Exception) -> int | None:
    """Says an error that has a name in one line; None for one that has none, a fault of ours."""
    if not isinstance(error, TandemError):
        return None
    if not isinstance(error, ChildRefused):  # the child has said it
        print(f"tandem: {error.message}", file=sys.stderr)
    return EXIT_CONFIG if isinstance(error, ConfigError) else 1
