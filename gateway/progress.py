"""How far the answers of one request have come, and what another attempt has to know of them."""

from core.messages import Branch, StopReason, TokenLogprobs, Tokens
from gateway.backend import TokenBatch


class Progress:
    """The tokens that the client has of each choice that goes on."""

    def __init__(self, num_choices: int, sent: tuple[Branch, ...] | None = None) -> None:
        """With `sent`, those go on that it names, behind what it says of them."""
        known = [Branch(choice=choice) for choice in range(num_choices)] if sent is None else sent
        self._sent = {each.choice: list(each.sent_token_ids) for each in known}
        self.num_sent = sum(map(len, self._sent.values()))

    @property
    def begun(self) -> bool:
        """Whether the client has any token."""
        return self.num_sent > 0

    @property
    def goes_on(self) -> bool:
        """Whether any choice has not ended."""
        return bool(self._sent)

    def branches(self) -> tuple[Branch, ...]:
        """What goes on. The longest comes first: it is read again as one prompt, by who reads
        fastest; the others compute what they have beside running answers."""
        return tuple(
            Branch(choice=choice, sent_token_ids=tuple(sent))
            for choice, sent in sorted(self._sent.items(), key=lambda item: -len(item[1]))
        )

    def end(self, choice: int) -> None:
        """Nothing more of this choice is wanted. Idempotent."""
        self._sent.pop(choice, None)

    def take(self, tokens: tuple[Tokens, ...], ended: StopReason | None) -> list[TokenBatch]:
        """A batch for each choice that got something; what is not wanted is left out.

        `ended` is why every choice is over that has no reason of its own.
        """
        got: dict[int, _Got] = {}
        for each in tokens:
            if each.choice in self._sent:
                got.setdefault(each.choice, _Got()).add(each)
        if ended is not None:
            for choice in self._sent:
                mine = got.setdefault(choice, _Got())
                mine.stop_reason = mine.stop_reason or ended
        for choice, mine in got.items():
            self._sent[choice] += mine.token_ids
            self.num_sent += len(mine.token_ids)
            if mine.stop_reason:
                del self._sent[choice]
        return [mine.batch(choice) for choice, mine in got.items()]


class _Got:
    """What came of one choice."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.stop_reason = StopReason.UNSPECIFIED
        self._logprobs: list[TokenLogprobs] = []

    def add(self, tokens: Tokens) -> None:
        self.token_ids += tokens.token_ids
        self._logprobs += tokens.logprobs
        self.stop_reason = tokens.stop_reason

    def batch(self, choice: int) -> TokenBatch:
        return TokenBatch(
            choice=choice,
            token_ids=tuple(self.token_ids),
            stop_reason=self.stop_reason or None,
            logprobs=tuple(self._logprobs),
        )
