"""Token ids to text, as they come. Exact: the deltas concatenate to the decoding of all ids.

Each token is bytes, and UTF-8 decodes incrementally, so a token costs its own length and no window
of earlier tokens is decoded again.
"""

import codecs
from collections.abc import Mapping

from gateway.tokenizer import PromptTokenizer


class Detokenizer:
    """The text of one generation. A character that spans tokens waits for its last byte.

    Special tokens are no text, but for those of `shown`, by id.
    """

    def __init__(self, tokenizer: PromptTokenizer, shown: Mapping[int, str] | None = None) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Between two characters, as nearly always, the decoder need not be asked.
        self._inside = False

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; often "" inside a character."""
        if self._shown and token_id in self._shown:
            added = self._shown[token_id].encode()
        else:
            added = self._token_bytes(token_id)
        if not self._inside:
            try:
                return added.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(added)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """One U+FFFD where the generation ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
