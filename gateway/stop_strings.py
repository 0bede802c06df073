"""Finds stop strings in generated text and never lets a character of one out.

An automaton after Aho and Corasick (Efficient string matching, CACM 18(6), 1975): its state is the
longest end of the text so far that begins a stop string, which is exactly what must be held back.
The match that completes first wins; of several that complete with one character, the longest. So
the result does not depend on how the text is cut.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    depth: int
    moves: dict[str, "_State"] = field(default_factory=dict)
    # The longest proper end of this state's string that is a state too.
    fallback: "_State | None" = None
    # Length of the longest stop string that ends here; 0 for none.
    match: int = 0


class StopStrings:
    """A matcher over one generation's text. Costs O(1) a character, amortised."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._root = _build(stops)
        self._state = self._root
        self._held = ""
        # The stop string that occurred; None while none has.
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may go out. After a match `matched` is set and nothing more comes out."""
        if self.matched:
            return ""
        if not self._root.moves:
            return text
        pending = self._held + text
        for i, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, char)
            if self._state.match:
                start = i - self._state.match
                self.matched = pending[start:i]
                self._held = ""
                return pending[:start]
        cut = len(pending) - self._state.depth
        self._held = pending[cut:]
        return pending[:cut]

    def finish(self) -> str:
        """Releases what was held back for a match that did not come."""
        held, self._held = self._held, ""
        return held

    def _step(self, state: _State, char: str) -> _State:
        while char not in state.moves and state.fallback is not None:
            state = state.fallback
        return state.moves.get(char, self._root)


def _build(stops: tuple[str, ...]) -> _State:
    root = _State(depth=0)
    for stop in stops:
        state = root
        for char in stop:
            state = state.moves.setdefault(char, _State(depth=state.depth + 1))
        state.match = len(stop)
    queue = deque([root])
    while queue:  # breadth first: a fallback is always shallower, so already complete
        state = queue.popleft()
        for char, child in state.moves.items():
            queue.append(child)
            shorter = state.fallback
            while shorter is not None and char not in shorter.moves:
                shorter = shorter.fallback
            child.fallback = shorter.moves[char] if shorter is not None else root
            child.match = child.match or child.fallback.match
    return root
