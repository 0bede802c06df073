"""Writes the dashboards' JSON: `python -m deploy.dashboards.generate`; `--check` only compares.

Needs grafana-foundation-sdk, which the extra `dev` brings.
"""

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from deploy.dashboards.board import Board, Panel
from deploy.dashboards.serving import SERVING
from deploy.dashboards.workers import WORKERS

FOLDER = Path(__file__).resolve().parent
BOARDS = (SERVING, WORKERS)
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_HALF, _HEIGHT = 12, 8  # Grafana's grid is 24 wide


def as_json(board: Board) -> str:
    """The dashboard as Grafana imports it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["tandem"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    if board.by_process:
        made = made.with_variable(
            dashboard.QueryVariable("process")
            .datasource(_SOURCE)
            .query("label_values(tandem_kv_pool_blocks, process)")
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(_HALF)
        .height(_HEIGHT)
        .fill_opacity(30 if panel.stacked else 0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.NONE))
    )
    if panel.stacked:
        made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for number, query in enumerate(panel.queries):
        made = made.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
    return made


def main() -> None:
    """Writes the files, or says which are not what this code gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for board in BOARDS:
        path, text = FOLDER / f"{board.uid}.json", as_json(board)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"dashboards differ from their code (run `make dashboards`): {', '.join(stale)}")


if __name__ == "__main__":
    main()
