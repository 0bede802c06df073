"""The model's tokenizer as a router takes it: a zip archive of a Hugging Face folder's files."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

from core.model_card import TEMPLATE_FILE, TOKENIZER_FILE, ModelCard

_PIECE_BYTES = 64 * 1024
# The archive depends on the files alone, so its digest does, too.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class TokenizerArchive:
    """Made once, off the event loop, when it is first asked for."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    async def pieces(self) -> AsyncIterator[tuple[bytes, str]]:
        """The archive in pieces; its SHA-256 in hexadecimal with the last one, else ""."""
        archive = await asyncio.to_thread(lambda: self.archive)
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            yield archive[start:end], digest if end >= len(archive) else ""

    @cached_property
    def archive(self) -> bytes:
        """The whole of it."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as folder:
            for name, content in self._files().items():
                folder.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
        return packed.getvalue()

    @cached_property
    def bos_token_id(self) -> int | None:
        """The id of what begins a text; None where the tokenizer has no such token."""
        added = json.loads(self._card.tokenizer_path.read_text()).get("added_tokens", ())
        ids: list[int] = [each["id"] for each in added if each["content"] == self._card.bos_token]
        return ids[0] if ids else None

    def _files(self) -> dict[str, str]:
        card = self._card
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": card.context_window,
            "bos_token": card.bos_token or None,
            "eos_token": card.eos_token or None,
        }
        files = {TOKENIZER_FILE: card.tokenizer_path.read_text()}
        if card.chat_template is not None:
            config["chat_template"] = card.chat_template
            files[TEMPLATE_FILE] = card.chat_template
        files["tokenizer_config.json"] = json.dumps(config)
        return files
