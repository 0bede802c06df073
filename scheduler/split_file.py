"""A person's split of the workers, kept beyond the scheduler's death."""

import json
from dataclasses import asdict
from pathlib import Path

from scheduler.elastic import Split


class SplitFile:
    """Keeps it in a file; without a path, in nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> Split | None:
        """None where there is none, or none that can be read."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_text())
            return Split(prefill=int(found["prefill"]), decode=int(found["decode"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, override: Split | None) -> None:
        """Keeps it, or forgets the one that is kept."""
        if self._path is None:
            return
        if override is None:
            self._path.unlink(missing_ok=True)
            return
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(override)))
        partial.replace(self._path)
