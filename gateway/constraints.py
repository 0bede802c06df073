"""What an answer must be, as a grammar: the makers that every protocol's words end in.

Each takes what the client wrote and the field that it wrote it in. Whether the grammar can be held
is found out later, off the event loop: `gateway.grammar_check`.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from core.errors import InvalidGrammar, InvalidRequest
from core.grammar import schema_text, words
from core.messages import Grammar, GrammarKind
from gateway.inputs import GrammarInput
from gateway.json_body import parse_text

_ANY_OBJECT = {"type": "object"}


def any_object(field: str) -> GrammarInput:
    """Some JSON object."""
    return of_schema(_ANY_OBJECT, field)


def of_schema(schema: dict[str, Any], field: str) -> GrammarInput:
    """JSON of a schema, whose values are finite and whose depth is bounded."""
    text = schema_text(schema)
    return GrammarInput(grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, text=text), field=field)


def of_schema_text(text: str, field: str) -> GrammarInput:
    """The same of a schema's text. Raises InvalidRequest where that is not a JSON object."""
    return of_schema(parse_text(text, field), field)


def of_regex(pattern: str, field: str) -> GrammarInput:
    """A match of a regular expression, from end to end."""
    return GrammarInput(grammar=Grammar(kind=GrammarKind.REGEX, text=pattern), field=field)


def of_choice(choices: Sequence[str], field: str) -> GrammarInput:
    """One of several texts. Raises InvalidRequest where there are none."""
    if not choices:
        raise InvalidRequest("must hold at least one string", field=field)
    alternatives = " | ".join(map(json.dumps, dict.fromkeys(choices)))
    return _lark(f"start: {alternatives}\n", field)


def of_grammar(text: str, field: str) -> GrammarInput:
    """A word of a grammar: Lark as it is; GBNF, which llama.cpp and others write, in Lark's words.

    Raises InvalidGrammar where GBNF cannot be read.
    """
    try:
        return _lark(str(any_to_lark(text)), field)
    except Exception as error:  # the library raises what its parser stumbles over
        raise InvalidGrammar(words(str(error)), field=field) from None


def only_one(found: Iterable[GrammarInput]) -> GrammarInput | None:
    """The one constraint of a request. Raises InvalidRequest where there is a second."""
    asked = list(found)
    if len(asked) > 1:
        raise InvalidRequest(f"cannot be combined with {asked[0].field}", field=asked[1].field)
    return asked[0] if asked else None


def _lark(text: str, field: str) -> GrammarInput:
    return GrammarInput(grammar=Grammar(kind=GrammarKind.LARK, text=text), field=field)
