"""The hand-off's tables as Markdown: `python -m kv_transfer.describe docs/handoff.md` renews them.

A page has each table between a comment with its name, `<!-- receiver -->` or `<!-- sender -->`, and
`<!-- end -->`.
"""

import enum
import re
import sys
from pathlib import Path
from typing import TypeVar

from kv_transfer.states import RECEIVER, SENDER, Table

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)
A = TypeVar("A", bound=enum.Enum)

_SECTION = re.compile(r"(<!-- (receiver|sender) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables renewed."""
    tables = {"receiver": markdown(RECEIVER), "sender": markdown(SENDER)}
    return _SECTION.sub(lambda found: f"{found[1]}{tables[found[2]]}{found[3]}", text)


def markdown(table: Table[S, E, A]) -> str:
    """One row per state and result; events with the same result share it.

    States and events come in the order of their enums. What changes nothing, as it is late or
    expected, is the last row of its state.
    """
    lines = ["| State | Event | Next | Actions, in order |", "|---|---|---|---|"]
    for state in type(next(iter(table))[0]):
        rows: dict[tuple[S, tuple[A, ...]], list[E]] = {}
        for event in type(next(iter(table))[1]):
            if (state, event) in table:
                rows.setdefault(table[state, event], []).append(event)
        unchanged = rows.pop((state, ()), [])
        for (after, actions), events in rows.items():
            lines.append(_row(state, events, after.name, ", ".join(_words(a) for a in actions)))
        if unchanged:
            lines.append(_row(state, unchanged, "-", ""))
    return "\n".join(lines) + "\n"


def _row(state: enum.Enum, events: list[E], after: str, actions: str) -> str:
    happened = ", ".join(_words(event) for event in events)
    return f"| {state.name} | {happened} | {after} | {actions or '-'} |"


def _words(member: enum.Enum) -> str:
    return str(member.value).replace("_", " ")


def main() -> None:
    """Renews the pages named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
