"""In place of `engine.prepare`: the model is a folder, the card is made in it."""

import sys
from pathlib import Path

from core.model_card import ModelCard

folder = Path(sys.argv[1])
if not folder.is_dir():
    sys.exit(f"no such model: {folder}")
print("reading the model", file=sys.stderr)
ModelCard(
    folder=str(folder),
    source=str(folder),
    name="fake",
    revision="1",
    architecture="llama",
    vocab_size=16,
    context_window=32,
    eos_token_ids=(0,),
    bos_token="<s>",
    eos_token="</s>",
).store()
print(folder)
