"""`tandem chat`: one question, or a conversation."""

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing

from cli.client import Client
from core.errors import TandemError


class Conversation:
    """The messages so far, and how to ask for the next answer."""

    def __init__(
        self,
        client: Client,
        model: str,
        options: Mapping[str, object],
        *,
        system: str | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def say(self, text: str) -> Generator[str, None, None]:
        """The answer, piece by piece. An answer that broke off leaves no trace of its turn."""
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        with closing(self._client.stream_chat(self._model, asked, self._options)) as pieces:
            for piece in pieces:
                answer += piece
                yield piece
        self._messages = [*asked, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages = list(self._opening)


def say_once(talk: Conversation, text: str) -> None:
    """Prints the answer to one message as it comes."""
    begun = False
    try:
        with closing(talk.say(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
                begun = True
    finally:  # what follows a part of an answer starts on its own line
        if begun:
            print(flush=True)


def converse(talk: Conversation) -> None:
    """Answers line by line until the input ends. On a terminal it prompts and survives errors."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() editing and a history
    for line in _lines(interactive):
        if line == "/quit":
            return
        if line == "/reset":
            talk.reset()
        elif line.startswith("/"):
            print("/reset forgets the conversation, /quit ends it", file=sys.stderr)
        elif line:
            _turn(talk, line, interactive)


def _turn(talk: Conversation, line: str, interactive: bool) -> None:
    try:
        say_once(talk, line)
    except KeyboardInterrupt:  # stops the answer; a second one, at the prompt, ends the command
        if not interactive:
            raise
    except TandemError as error:
        if not interactive:
            raise
        print(f"tandem: {error.message}", file=sys.stderr)


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
