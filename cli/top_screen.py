"""The screen of `tandem top`: asks in an interval, and shows what came."""

import time
from collections.abc import Iterable
from typing import ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Sparkline, Static

from cli import top_tables as tables
from cli.operator_client import Snapshot
from core.errors import TandemError


class Source(Protocol):
    """Where snapshots come from."""

    async def snapshot(self) -> Snapshot:
        """Raises TandemError where the cluster does not answer."""
        ...


class TopApp(App[None]):
    """A cluster that goes away is said to be away, until it is there again."""

    TITLE = "tandem top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "end"),
        ("p", "hold", "hold"),
    ]
    CSS = """
    Screen { layout: vertical; overflow-y: auto; }
    #head { height: 1; }
    #trouble { height: auto; color: $error; }
    DataTable { height: auto; margin-top: 1; }
    #curves { height: 4; margin-top: 1; }
    #curves Vertical { width: 1fr; height: 4; padding-right: 2; }
    Sparkline { height: 2; }
    """

    def __init__(self, source: Source, where: str, *, interval_s: float) -> None:
        super().__init__()
        self._source = source
        self._where = where
        self._interval_s = interval_s
        self._held = False
        self._asking = False
        self._speed = tables.Speedometer({}, 0.0)
        self._looked_s = time.monotonic()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="trouble")
        for name, columns in (
            ("models", tables.MODELS),
            ("workers", tables.WORKERS),
            ("gateways", tables.GATEWAYS),
            ("transfers", tables.TRANSFERS),
        ):
            table: DataTable[str | Text] = DataTable(id=name, cursor_type="none")
            table.add_columns(*columns)
            yield table
            if name == "workers":
                yield Static(_legend())
        with Horizontal(id="curves"):
            for name, words in (("ttft", "TTFT, 95th"), ("itl", "between tokens, 95th")):
                with Vertical():
                    yield Static(words)
                    yield Sparkline([], id=name, summary_function=max)
        yield Footer()

    async def on_mount(self) -> None:
        self.set_interval(self._interval_s, self.look)
        await self.look()

    def action_hold(self) -> None:
        """Holds the picture, or lets it go on."""
        self._held = not self._held

    async def look(self) -> None:
        """Asks once, and shows what came. One question at a time."""
        if self._held or self._asking:
            return
        self._asking = True
        try:
            snapshot = await self._source.snapshot()
        except TandemError as error:
            self.query_one("#trouble", Static).update(Text(f"no answer: {error.message}"))
        else:
            self.query_one("#trouble", Static).update("")
            self._show(snapshot)
        finally:
            self._asking = False

    def _show(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        speed = tables.Speedometer(self._speed.before, now_s - self._looked_s)
        self.query_one("#head", Static).update(
            Text.assemble((f"{self._where}   ", "dim"), (tables.summary(snapshot), "bold"))
        )
        self._fill("models", tables.models(snapshot))
        self._fill("workers", tables.workers(snapshot))
        self._fill("gateways", tables.gateways(snapshot))
        self._fill("transfers", speed.rows(snapshot))
        for name, field in (("ttft", "ttft_p95_s"), ("itl", "itl_p95_s")):
            self.query_one(f"#{name}", Sparkline).data = tables.curve(snapshot, field)
        self._speed = tables.Speedometer(tables.sent_bytes(snapshot), 0.0)
        self._looked_s = now_s

    def _fill(self, name: str, rows: Iterable[tables.Row]) -> None:
        table = self.query_one(f"#{name}", DataTable)
        table.clear()
        for row in rows:
            table.add_row(*row)


def _legend() -> Text:
    legend = Text()
    for state, colour in tables.STATES.items():
        legend.append("█ ", colour).append(f"{state.replace('_', ' ')}   ")
    return legend
