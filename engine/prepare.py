"""Making a model's card: everything that is known of a model without loading its weights.

`python -m engine.prepare MODEL` prints the card's folder as its one line on stdout. The folder is
made once per model file and reused while the file's path, size and time of change stay the same;
the card's `revision` is a digest of the content. It lies in $TANDEM_CACHE, else in
$XDG_CACHE_HOME/tandem, else in ~/.cache/tandem.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import xxhash
from tokenizers import Tokenizer

from core.errors import ConfigError
from core.model_card import TEMPLATE_FILE, TOKENIZER_FILE, ModelCard
from core.process import EXIT_CONFIG
from engine.gguf_tokenizer import SpecialTokens
from engine.hf_config import config_from_hf
from engine.model_config import ModelConfig
from engine.model_locator import Located, locate
from engine.native.build import NativeUnavailable, ensure_built

# Part of the cache key: a card of an older make is left behind.
_CARD_FORMAT = 2
_READ_BYTES = 2**24


def prepare(model: str, cache_root: Path | None = None) -> ModelCard:
    """The card of a model, made where it is not in the cache yet.

    `model` is the default model's name, a GGUF file, a Hugging Face folder or a hub id. Raises
    ConfigError with one clear line where it is missing, damaged or of a kind not supported.
    """
    located = locate(model)
    files = _weight_files(located.path)
    models = (cache_root or _cache_root()).absolute() / "models"
    slug = re.sub(r"[^\w.-]+", "-", located.name)
    folder = models / f"{slug}-{_identity(located, files)}"
    with contextlib.suppress(ConfigError):
        return ModelCard.load(folder)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models, prefix=".new-") as made:
            _make(located, files, Path(made))
            _move_into_place(Path(made), folder)
    except OSError as error:
        raise ConfigError(f"cannot write the model cache {models}: {error}") from error
    return ModelCard.load(folder)


def _cache_root() -> Path:
    if os.environ.get("TANDEM_CACHE"):
        return Path(os.environ["TANDEM_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tandem"


def _weight_files(path: Path) -> list[Path]:
    """The files that the card is made from: the GGUF, or a folder's known files."""
    if path.is_file():
        return [path]
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json: not a Hugging Face model folder")
    kinds = {".json", ".safetensors", ".jinja", ".model", ".txt"}
    return sorted(each for each in path.iterdir() if each.suffix in kinds and each.is_file())


def _identity(located: Located, files: list[Path]) -> str:
    """Tells one state of the source from another without reading it."""
    digest = xxhash.xxh3_128(f"{_CARD_FORMAT}\0{located.name}".encode())
    for path in files:
        stat = path.stat()
        digest.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _revision(files: list[Path]) -> str:
    """A digest of the content, equal on every machine that holds the same model."""
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    return digest.hexdigest()


def _make(located: Located, files: list[Path], folder: Path) -> None:
    """Fills a new card folder."""
    if located.path.is_file():
        config, special = _from_gguf(located.path, folder)
    else:
        config, special = _from_folder(located.path, folder)
    num_tokens = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).get_vocab_size()
    if num_tokens > config.vocab_size:
        raise ConfigError(
            f"{located.path}: {num_tokens} tokens, and embeddings for {config.vocab_size}"
        )
    beyond = [each for each in special.eos_token_ids if not 0 <= each < config.vocab_size]
    if beyond:
        raise ConfigError(f"{located.path}: end token {beyond[0]} is not in the vocabulary")
    ModelCard(
        folder=str(folder),
        source=str(located.path),
        name=located.name,
        revision=_revision(files),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        context_window=config.context_window,
        eos_token_ids=special.eos_token_ids,
        bos_token=special.bos_token,
        eos_token=special.eos_token,
    ).store()


def _from_gguf(path: Path, folder: Path) -> tuple[ModelConfig, SpecialTokens]:
    from engine.gguf_file import open_gguf
    from engine.gguf_tokenizer import bpe_tokenizer, is_byte_level_bpe, special_tokens

    opened = open_gguf(path)
    config = opened.config()
    special = special_tokens(opened.metadata, str(path))
    if is_byte_level_bpe(opened.metadata, str(path)):
        tokenizer = bpe_tokenizer(opened.metadata, str(path))
        tokenizer.save(str(folder / TOKENIZER_FILE))
    else:
        from engine.hf_tokenizer import convert_tokenizer

        convert_tokenizer(path.parent, folder, gguf_file=path.name)
    template = opened.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / TEMPLATE_FILE).write_text(template)
    return config, special


def _from_folder(path: Path, folder: Path) -> tuple[ModelConfig, SpecialTokens]:
    from engine.hf_tokenizer import copy_tokenizer

    try:
        values = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path / 'config.json'}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path / 'config.json'} is not a JSON object")
    return config_from_hf(values, str(path)), copy_tokenizer(path, folder)


def _move_into_place(made: Path, folder: Path) -> None:
    """Renames the new folder, whole or not at all. Another process's equal one is as good."""
    try:
        os.rename(made, folder)
    except OSError:
        with contextlib.suppress(ConfigError):
            ModelCard.load(folder)
            return
        shutil.rmtree(folder)  # half a folder: nothing that this program made
        os.rename(made, folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.prepare", description=__doc__)
    parser.add_argument("model", help="default name, GGUF file, Hugging Face folder or hub id")
    model = parser.parse_args().model
    try:
        # Libraries print to stdout; that belongs to the one line of the result.
        with contextlib.redirect_stdout(sys.stderr):
            card = prepare(model)
        # Before the workers start, who would all wait for it. One that needs them says why not.
        with contextlib.suppress(NativeUnavailable):
            ensure_built()
    except ConfigError as error:
        print(f"prepare: {' '.join(error.message.split())}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    print(card.folder)


if __name__ == "__main__":
    main()
