"""What every process knows of the model without loading it.

A card is made once per model by `engine.prepare` and lies in a cache folder with the tokenizer and
the chat template beside it, so that the gateway starts without torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from core.errors import ConfigError

CARD_FILE = "card.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as its card describes it. `folder` holds the card, the tokenizer, the template."""

    folder: str
    # The weights: a GGUF file, or a folder with config.json and safetensors.
    source: str
    # The name that the API shows unless the operator gives another.
    name: str
    # A digest of what the model computes from: two workers with one revision hold equal weights.
    revision: str
    architecture: str
    vocab_size: int
    # Prompt and answer together fit in this many tokens.
    context_window: int
    eos_token_ids: tuple[int, ...]
    # What the chat template may print as {{ bos_token }} and {{ eos_token }}.
    bos_token: str
    eos_token: str

    @property
    def tokenizer_path(self) -> Path:
        return Path(self.folder) / TOKENIZER_FILE

    @property
    def chat_template(self) -> str | None:
        """The Jinja source, or None where the model has no chat template."""
        path = Path(self.folder) / TEMPLATE_FILE
        return path.read_text() if path.exists() else None

    def store(self) -> None:
        """Writes the card into its folder. Where it lies is not part of it: a folder may move."""
        values = asdict(self)
        del values["folder"]
        (Path(self.folder) / CARD_FILE).write_text(json.dumps(values, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a card. Raises ConfigError where there is none that this version understands."""
        try:
            values = json.loads((folder / CARD_FILE).read_text())
            values["eos_token_ids"] = tuple(values["eos_token_ids"])
            return cls(**values | {"folder": str(folder)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"no readable model card in {folder}: {error}") from error
