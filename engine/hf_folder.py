"""A Hugging Face model folder: config.json, and safetensors in one file or several."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError
from engine.hf_config import config_from_hf
from engine.model_config import ModelConfig

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class HfFolder:
    """Opens a folder. Raises ConfigError where a file is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = _read_json(path / CONFIG_FILE)
        self._shards = _shards(path)

    @property
    def num_tensors(self) -> int:
        return sum(len(names) for names in self._shards.values())

    def config(self) -> ModelConfig:
        """The model's shape. Raises ConfigError where the engine cannot compute it."""
        return config_from_hf(self._values, str(self.path))

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, "_FileTensor"]]:
        """Every tensor as it is stored."""
        for path, names in self._shards.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, _FileTensor(file, name)


class _FileTensor:
    """A tensor of a safetensors file, of which no more is read than is asked for."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        self._slice = file.get_slice(name)
        self.shape: Sequence[int] = self._slice.get_shape()

    def read(self, part: tuple[slice, ...] | None = None) -> Tensor:
        found: Tensor = self._file.get_tensor(self._name) if part is None else self._slice[part]
        return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return values


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Which file holds which tensors."""
    index = folder / INDEX_FILE
    if not index.exists():
        path = folder / SINGLE_FILE
        if not path.exists():
            raise ConfigError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {path: _names(path)}
    try:
        weight_map: dict[str, str] = _read_json(index)["weight_map"]
        shards: dict[Path, list[str]] = {}
        for name, file_name in weight_map.items():
            shards.setdefault(folder / file_name, []).append(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} has no usable weight_map") from error
    for path, names in shards.items():
        lost = set(names) - set(_names(path))
        if lost:
            raise ConfigError(f"{path}: tensor {min(lost)} is missing")
    return shards


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is missing or damaged: {error}") from error
