"""Whether a process has started, lives, and can take work; asked by probes, told in words.

*Started* once it serves. *Alive* while it gets on: its event loop answers, which asking alone finds
out, and nothing that it owns stands still. *Ready* where a request given to it now would be served.
A process that is busy, draining or without peers is alive: a restart would mend none of that.
"""

from collections.abc import Callable, Mapping

# Why not; None where all is well.
Check = Callable[[], str | None]


class Health:
    """Filled by those who know, one check each; the first that has something to say is told."""

    def __init__(self) -> None:
        self._starting: str | None = "it is starting"
        self._alive: list[Check] = []
        self._ready: list[Check] = []

    def alive_if(self, check: Check) -> None:
        """Adds a check of liveness. It must be fast, and sound: where it fails, a restart helps."""
        self._alive.append(check)

    def ready_if(self, check: Check) -> None:
        """Adds a check of readiness."""
        self._ready.append(check)

    def starting(self, what: str) -> None:
        """Says what the start waits for."""
        self._starting = what

    def started(self) -> None:
        """It serves from now on."""
        self._starting = None

    def not_started(self) -> str | None:
        """What the start waits for; None once it is over."""
        return self._starting

    def not_alive(self) -> str | None:
        """What stands still."""
        return _first(self._alive)

    def not_ready(self) -> str | None:
        """Why no work is taken now."""
        return self._starting or _first(self._ready)


def told_by_model(reasons: Mapping[str, str | None]) -> str | None:
    """Why not, of several models in one line; None where all is well. One reason of all: once."""
    found = {name: why for name, why in reasons.items() if why is not None}
    if len(found) == len(reasons) and len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{name}: {why}" for name, why in found.items()) or None


def _first(checks: list[Check]) -> str | None:
    return next((why for check in checks if (why := check()) is not None), None)
