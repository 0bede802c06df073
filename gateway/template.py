"""A conversation to a prompt, by the chat template that comes with the model.

The template is the operator's (it lies beside the weights); its inputs are the client's. Jinja's
immutable sandbox keeps the template from the interpreter, and a budget of loop turns, sizes and
time (`gateway.template_sandbox`) sees to it that a render ends. What it prints may be the client's
own characters and a bounded number of the template's.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta

from core.errors import ConfigError, ContextTooLong, InvalidRequest, TandemError
from core.model_card import ModelCard
from gateway.control_tokens import ControlTokens
from gateway.inputs import ChatMessage, Tool
from gateway.template_budget import Budget, TooMuch
from gateway.template_sandbox import BUDGET, bounded_filter, environment
from gateway.tools import offer

# What the template adds, per token of the window: no control token is written longer than this.
_CHARS_PER_TOKEN = 16
RENDER_TIMEOUT_S = 5.0


class ChatTemplate:
    """One model's template. Raises ConfigError where it is not valid Jinja."""

    def __init__(self, card: ModelCard, controls: ControlTokens, *, window: int) -> None:
        source = card.chat_template
        self._source = source or ""
        self._controls = controls
        self._max_added_chars = window * _CHARS_PER_TOKEN
        self._special = {"bos_token": card.bos_token, "eos_token": card.eos_token}
        try:
            self._template = None if source is None else _compiled(source)
            # Whether the template tells the model of tools.
            self.takes_tools = source is not None and "tools" in _variables(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template in {card.folder}: {error}") from error

    @property
    def source(self) -> str:
        """The Jinja source; "" where there is none."""
        return self._source

    @property
    def exists(self) -> bool:
        return self._template is not None

    def render(self, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...] = ()) -> str:
        """The prompt, with the clients' strings masked (`ControlTokens.mask`). For a worker thread.

        A "developer" message is told as "system" to a template that knows no developers. A template
        that knows no tools gets them, and what was called, in plain messages. Raises
        InvalidRequest naming `messages` where the template refuses the conversation, fails or
        takes longer than RENDER_TIMEOUT_S, and ContextTooLong where it prints too much.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use completions instead", field="messages"
            )
        if not self.takes_tools:
            messages, tools = offer.in_words(messages, tools), ()
        definitions = [offer.definition(tool, self._controls.mask) for tool in tools]
        turns = [self._as_dict(message) for message in messages]
        budget = Budget(timeout_s=RENDER_TIMEOUT_S)
        pieces = self._template.generate(
            messages=turns,
            add_generation_prompt=True,
            tools=definitions or None,
            documents=None,
            raise_exception=_raise,
            strftime_now=_strftime_now,
            range=budget.range,
            **{BUDGET: budget},
            **self._special,
        )
        client_chars = sum(map(_length, messages)) + _size(definitions)
        try:
            return _collect(pieces, client_chars + self._max_added_chars)
        except TandemError:
            raise
        except TooMuch as error:
            if error.late:
                raise render_timeout() from None
            raise InvalidRequest(
                "rendering the conversation takes more than the chat template may use",
                field="messages",
            ) from None
        except _Refused as error:
            raise InvalidRequest(self._reason(error), field="messages") from None
        except Exception as error:  # a template can raise anything; its text may quote the client
            raise InvalidRequest(
                f"the chat template cannot render this conversation ({type(error).__name__})",
                field="messages",
            ) from None

    def _as_dict(self, message: ChatMessage) -> dict[str, Any]:
        role, mask = message.role, self._controls.mask
        if role == "developer" and role not in self._source:
            role = "system"
        turn: dict[str, Any] = {"role": role, "content": mask(message.content)}
        if message.tool_calls:  # templates ask whether the key is there
            turn["tool_calls"] = [offer.call(made, mask) for made in message.tool_calls]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = mask(message.tool_call_id)
        if message.name is not None:
            turn["name"] = mask(message.name)
        return turn

    def _reason(self, refusal: "_Refused") -> str:
        """The template's own words, unless they are not all its own."""
        words = str(refusal)
        if words in self._source:
            return f"the chat template refuses this conversation: {words}"
        return "the chat template refuses this conversation"


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _compiled(source: str) -> jinja2.Template:
    jinja = environment()
    jinja.filters["tojson"] = bounded_filter("tojson", _tojson)
    return jinja.from_string(source)


def _variables(source: str) -> set[str]:
    """The names that the template expects from outside."""
    return jinja2.meta.find_undeclared_variables(environment().parse(source))


def _length(message: ChatMessage) -> int:
    return len(message.content) + sum(2 * len(made.arguments) for made in message.tool_calls)


def _size(definitions: list[dict[str, Any]]) -> int:
    """Characters that the definitions may take: some templates indent them."""
    return 4 * len(json.dumps(definitions)) if definitions else 0


def _collect(pieces: Iterator[str], max_chars: int) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > max_chars:
            raise ContextTooLong(
                "the conversation is larger than the context window once rendered",
                field="messages",
            )
    return "".join(parts)


def render_timeout() -> InvalidRequest:
    """What a client is told whose conversation takes too long to render."""
    return InvalidRequest(
        f"rendering the conversation took longer than {RENDER_TIMEOUT_S:g} s", field="messages"
    )


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes what HTML would trip over."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
