"""docs/configuration.md is the whole truth about settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cli.main import app
from core.config import ClusterConfig
from core.model_settings import ModelSettings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _settings(field.annotation, f"{name}.")
        else:
            yield f"{prefix}{name}", field


SETTINGS = dict([*_settings(ClusterConfig), *_settings(ModelSettings, "models.")])


def _rows() -> dict[str, list[str]]:
    """The table's cells by setting: default, range, flag, meaning."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_every_setting_is_on_the_page_and_no_other():
    assert set(_rows()) == set(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_page_gives_the_true_default(setting: str):
    default = SETTINGS[setting].default
    if SETTINGS[setting].is_required():
        assert not _rows()[setting][0]
        return
    shown = str(default).lower() if default is None or isinstance(default, bool) else str(default)
    assert _rows()[setting][0] == f"`{shown}`"


def test_every_flag_of_serve_and_run_is_on_the_page_and_no_other():
    commands = typer.main.get_command(app).commands
    flags = {
        option
        for name in ("serve", "run")
        for parameter in commands[name].params
        for option in parameter.opts
    } - {"role", "--name", "--serves", "--on", "--address"}
    shown = {row[2].strip("`") for row in _rows().values() if row[2] != "-"}
    assert shown == flags - {"--config", "--help"}
