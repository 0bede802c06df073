"""Grammars that hold an answer, in llguidance's words and within our bounds.

The gateway asks `check_grammar` before a request queues; a worker's compiler works from the same
text under the same limits. See docs/adr/0004.
"""

import json

from llguidance import LLMatcher, LLParserLimits

from core.errors import InvalidGrammar
from core.messages import Grammar, GrammarKind

# Between two JSON tokens: one blank, or one line break and its indentation. Without a bound a small
# model prints blanks until its length ends.
JSON_WHITESPACE = r"(\n[ ]{0,32}|[ ])?"
_MAX_MESSAGE_CHARS = 400


def limits() -> LLParserLimits:
    """How much work a grammar may cost. The units are the library's own.

    Its defaults let one mask take seconds; with these the worst that we found takes half of one.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def grammar_source(grammar: Grammar) -> str:
    """The grammar as the library compiles it. Raises InvalidGrammar where it is not even JSON."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": JSON_WHITESPACE}
            )
        except ValueError as error:
            raise InvalidGrammar(words(str(error))) from None
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.text)
    raise InvalidGrammar("a grammar of a kind that is not known here")


def check_grammar(grammar: Grammar) -> None:
    """Raises InvalidGrammar with the library's words where it cannot hold an answer to this.

    Takes milliseconds, for large schemas tenths of a second, without the interpreter's lock.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(
        grammar_source(grammar), limits=limits()
    )
    if failed:
        raise InvalidGrammar(words(messages[0]))


def words(message: str) -> str:
    """The library's message as one short line; it may quote the grammar, which is the client's."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE_CHARS else f"{line[:_MAX_MESSAGE_CHARS]}..."


def schema_text(schema: object) -> str:
    """A schema as the text that travels: plain ASCII, keys in the order in which they came."""
    return json.dumps(schema, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
