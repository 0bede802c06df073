"""The grammar of an answer that calls tools, in the dialect that its model was taught.

Every tool's arguments are a JSON Schema of their own, so that `$ref` finds what it means.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from core.errors import InvalidGrammar, InvalidRequest
from core.grammar import JSON_WHITESPACE, check_grammar, schema_text
from core.messages import Grammar, GrammarKind
from gateway.inputs import GrammarInput, Tool
from gateway.tools.dialect import Dialect
from gateway.tools.dialects import HERMES_CLOSE, HERMES_OPEN, MISTRAL_ARGS, MISTRAL_OPEN

# Calls of one answer that must call: a bound, so that a small model comes to an end.
_MAX_CALLS = 32
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# The id of a literal that is a control token; None where it is written as text.
ControlId = Callable[[str], int | None]


class CallGrammar:
    """Makes the grammars of one dialect and tokenizer."""

    def __init__(self, dialect: Dialect, control_id: ControlId) -> None:
        self._dialect = dialect
        self._control_id = control_id

    def forced(self, tools: Iterable[Tool], *, parallel: bool) -> Grammar:
        """Nothing but calls, at least one."""
        return self._grammar("start: calls", self._schemas(tools, all_strict=True), parallel)

    def free(self, tools: Iterable[Tool], *, parallel: bool) -> Grammar:
        """Any text, or calls: of tools that are strict, by their schemas."""
        schemas = self._schemas(tools, all_strict=False)
        if self._dialect.name == "llama3_json":
            start = "start: calls | FREE\nFREE: /([^{<\\s](.|\\n)*)?/"
            return self._grammar(start, schemas, parallel)
        opening = HERMES_OPEN if self._dialect.name == "hermes" else MISTRAL_OPEN
        if self._control_id(opening) is not None:
            start = "start: TEXT | TEXT calls"
        else:
            start = f"start: TEXT | lead after\nlead[lazy]: TEXT {_text(opening)}"
        return self._grammar(f"{start}\nTEXT: /(.|\\n)*/", schemas, parallel)

    def or_answer(self, tools: Iterable[Tool], answer: GrammarInput, *, parallel: bool) -> Grammar:
        """Calls, or an answer that is JSON of a schema."""
        if answer.grammar.kind is not GrammarKind.JSON_SCHEMA:
            raise InvalidRequest("cannot be combined with tools", field=answer.field)
        schema = json.loads(answer.grammar.text)
        start = f"start: calls | answer\nanswer: %json {_embedded(schema)}"
        return self._grammar(start, self._schemas(tools, all_strict=False), parallel)

    def check(self, tools: Sequence[Tool], *, held: Callable[[Tool], bool]) -> None:
        """Raises InvalidRequest naming the tool whose schema cannot be held and has to be."""
        for tool in tools:
            if held(tool) and tool.parameters is not None:
                schema = Grammar(
                    kind=GrammarKind.JSON_SCHEMA, text=schema_text(_as_object(tool.parameters))
                )
                try:
                    check_grammar(schema)
                except InvalidGrammar as error:
                    raise InvalidGrammar(error.message, field=f"{tool.path}.parameters") from None

    def _schemas(self, tools: Iterable[Tool], *, all_strict: bool) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = []
        for tool in tools:
            held = all_strict or tool.strict
            schema = _NO_ARGUMENTS if tool.parameters is None else _as_object(tool.parameters)
            found.append((tool.name, schema if held else _ANY_OBJECT))
        return found

    def _grammar(self, start: str, schemas: list[tuple[str, object]], parallel: bool) -> Grammar:
        lines = [start]
        more = _MAX_CALLS - 1 if parallel else 0
        calls = [f"call_{i}" for i in range(len(schemas))]
        lines += self._calls(more)
        lines.append(f"call: {' | '.join(calls)}")
        for i, (name, schema) in enumerate(schemas):
            lines.append(f"call_{i}: {self._call(name, f'args_{i}')}")
            lines.append(f"args_{i}: %json {_embedded(schema)}")
        return Grammar(kind=GrammarKind.LARK, text="\n".join(lines) + "\n")

    def _calls(self, more: int) -> list[str]:
        """The rule of one call and so many more; `after` is the same behind an opening marker."""
        match self._dialect.name:
            case "hermes":
                opening, closing = self._marker(HERMES_OPEN), self._marker(HERMES_CLOSE)
                end = f'"\\n" {closing}'
                again = _repeated(f'"\\n" {opening} "\\n" call {end}', more)
                return [f"calls: {opening} after", f'after: "\\n" call {end} {again}']
            case "llama3_json":
                again = _repeated('"; " call', more)
                return [f"calls: call {again}"]
        opening = self._marker(MISTRAL_OPEN)
        if self._dialect.named_calls:
            again = _repeated(f"{opening} call", more)
            return [f"calls: {opening} after", f"after: call {again}"]
        again = _repeated('", " call', more)
        return [f"calls: {opening} after", f'after: "[" call {again} "]"']

    def _call(self, name: str, arguments: str) -> str:
        if self._dialect.named_calls:
            return f"{_text(name)} {self._marker(MISTRAL_ARGS)} {arguments}"
        if self._dialect.name == "llama3_json":
            # In the pieces that JSON has: where an answer may be JSON as well, both begin alike.
            pieces = ("{", '"name"', ":", " ", json.dumps(name), ",", " ", '"parameters"', ":", " ")
            head = " ".join(map(_text, pieces))
        else:
            head = _text(f'{{"name": {json.dumps(name)}, "arguments": ')
        return f'{head} {arguments} "}}"'

    def _marker(self, literal: str) -> str:
        token_id = self._control_id(literal)
        return _text(literal) if token_id is None else f"<[{token_id}]>"


def _as_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where their schema does not say so."""
    return schema if "type" in schema else {"type": "object", **schema}


def _repeated(rule: str, most: int) -> str:
    return f"({rule}){{0,{most}}}" if most else ""


def _text(literal: str) -> str:
    """A literal in Lark's quotes, which are JSON's."""
    return json.dumps(literal)


def _embedded(schema: object) -> str:
    if not isinstance(schema, dict):
        return schema_text(schema)
    return schema_text({"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema})
