"""Profile files: a timing model as JSON, measured, or a GPU's data sheet and efficiencies."""

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bench.sim.roofline import Roofline
from bench.sim.timing import Timing
from core.errors import ConfigError

_SHIPPED = Path(__file__).parent / "profiles"
DEFAULT_PROFILE = "h100-llama-3.1-8b"


def shipped() -> list[str]:
    """The names of those that come with the code."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def load_timing(name: str) -> Timing:
    """Of a shipped profile's name or a file's path. Raises ConfigError that names the field."""
    values, source = _read(name)
    if "device" in values:
        return _roofline(values, source).timing()
    try:
        return TypeAdapter(Timing).validate_python(values)
    except ValidationError as error:
        raise _wrong(error, source) from error


def load_roofline(name: str) -> Roofline:
    """The same, of a profile that has a device. Raises ConfigError."""
    return _roofline(*_read(name))


def store(profile: Timing | Roofline, path: Path) -> None:
    """Writes a profile file. Raises ConfigError where it cannot be written."""
    values = profile.model_dump() if isinstance(profile, Roofline) else asdict(profile)
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _read(name: str) -> tuple[dict[str, object], str]:
    path = _SHIPPED / f"{name}.json" if name in shipped() else Path(name)
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no profile {name}: a file, or one of {', '.join(shipped())}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a profile is an object")
    return values, str(path)


def _roofline(values: dict[str, object], source: str) -> Roofline:
    try:
        return Roofline.model_validate(values)
    except ValidationError as error:
        raise _wrong(error, source) from error


def _wrong(error: ValidationError, source: str) -> ConfigError:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return ConfigError(f"{source}: {field}: {first['msg']}")
