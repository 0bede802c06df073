"""Reading numbers out of a model's settings, and naming what is wrong with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValues:
    """Settings of one source. A value of None counts as absent.

    Every reader raises ConfigError that says `place`, `prefix` and key, as in "m.gguf: the metadata
    has no llama.block_count".
    """

    values: Mapping[str, Any]
    place: str
    prefix: str = ""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, required where no default is given."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "is no whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, required where no default is given."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "is no number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.error(key, "is too large") from error

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "is no text")
        return value

    def inner(self, key: str) -> "ConfigValues":
        """The object under `key`, empty where there is none."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "is no object")
        return ConfigValues(values=value, place=self.place, prefix=f"{self.prefix}{key}.")

    def error(self, key: str, problem: str) -> ConfigError:
        """What is wrong with the value of `key`, which is quoted, shortened."""
        shown = repr(self.values.get(key))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ConfigError(f"{self.place}: {self.prefix}{key} ({shown}) {problem}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.place} has no {self.prefix}{key}")
        return value
