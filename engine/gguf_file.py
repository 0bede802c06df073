"""Opening a GGUF file: metadata as plain values, tensors as numpy views of the mapped file.

The `gguf` library raises whatever comes up where a file is damaged; here it becomes ConfigError.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from engine.gguf_config import config_from_gguf
from engine.model_config import ModelConfig

# Divisors of RoPE's frequencies, [head_dim / 2]: how a converted Llama 3 keeps its scaling.
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """An open file. `tensors` are `gguf.ReaderTensor`s by name, still quantised."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor shapes in torch's order, outermost dimension first (GGUF's is the other way)."""
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self.tensors.items()
        }

    def config(self) -> ModelConfig:
        """The model's shape. Raises ConfigError where the engine cannot compute it."""
        return config_from_gguf(
            self.metadata, self.shapes, self._rope_divisors(), source=str(self.path)
        )

    def _rope_divisors(self) -> tuple[float, ...] | None:
        tensor = self.tensors.get(ROPE_DIVISORS)
        if tensor is None:
            return None
        if tensor.data.dtype != "float32" or tensor.data.ndim != 1:
            raise ConfigError(f"{self.path}: tensor {ROPE_DIVISORS} is no row of float32 numbers")
        return tuple(tensor.data.tolist())


def open_gguf(path: Path) -> GgufFile:
    """Reads the header and maps the data. Raises ConfigError: missing, empty, not GGUF, cut off."""
    import gguf  # a tenth of a second, and only GGUF models need it

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if size == 0:
        raise ConfigError(f"{path} is empty")
    if magic != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file")
    try:
        reader = _reader(gguf.GGUFReader, path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:
        raise ConfigError(
            f"{path} is cut off or damaged ({type(error).__name__} while reading it)"
        ) from error
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _reader(library: type[Any], path: Path) -> Any:
    """The library's reader, made to stop where the file ends.

    As it is, it takes numbers past the end for empty ones, and a damaged array length then keeps it
    busy until the memory is full.
    """

    class StrictReader(library):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            values = super()._get(offset, dtype, count, *order, **named)
            if len(values) < int(count):
                raise ValueError("the file ends too early")
            return values

    return StrictReader(path)
