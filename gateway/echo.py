"""A completion's prompt as its answers repeat it."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt's text, and where its log probabilities are told its tokens and their places."""

    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    # Characters of `text` before each token.
    offsets: tuple[int, ...] = field(default=(), repr=False)


def echo_of(text: str, token_ids: tuple[int, ...], feed: Callable[[int], str]) -> Echo:
    """With places. `feed` gives the text that became certain with each token, as a detokenizer.

    What some tokenizers put before a text's first word is not in the text, and counts for nothing.
    """
    places: list[int] = []
    length = 0
    for token_id in token_ids:
        places.append(length)
        length += len(feed(token_id))
    extra = max(0, length - len(text))
    offsets = tuple(min(max(0, place - extra), len(text)) for place in places)
    return Echo(text=text, token_ids=token_ids, offsets=offsets)
