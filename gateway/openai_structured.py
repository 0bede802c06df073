"""What an answer must be, in the words of OpenAI (`response_format`) and of vLLM.

vLLM has two generations of words: the `guided_*` fields, and one object, `structured_outputs`. All
of them end in one grammar; two of them in one request contradict each other.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from core.errors import InvalidRequest, Unsupported
from gateway import constraints
from gateway.inputs import GrammarInput
from gateway.json_body import join_path
from gateway.strict_body import StrictBody

Found = Iterator[GrammarInput]


def _text_or_object(value: Any) -> str | None:
    """Picks a union's branch, so that an error speaks of that branch only."""
    if isinstance(value, str):
        return "@text"
    return "@object" if isinstance(value, dict) else None


TEXT_OR_OBJECT = Discriminator(
    _text_or_object,
    custom_error_type="text_or_object",
    custom_error_message="must be a string or an object",
)

# A JSON Schema, or its text.
SchemaOrText = Annotated[
    Annotated[str, Tag("@text")] | Annotated[dict[str, Any], Tag("@object")],
    TEXT_OR_OBJECT,
]


class JsonSchemaFormat(StrictBody):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is held whatever this says.")


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema.")

    def grammars(self) -> Found:
        """One where the format is not plain text. Raises InvalidRequest where parts are missing."""
        field = "response_format.json_schema"
        if self.type != "json_schema":
            if self.json_schema is not None:
                raise InvalidRequest("needs type json_schema", field=field)
            if self.type == "json_object":
                yield constraints.any_object("response_format")
            return
        if self.json_schema is None:
            raise InvalidRequest("is required with type json_schema", field=field)
        if self.json_schema.schema_ is None:
            raise InvalidRequest("is required", field=f"{field}.schema")
        yield constraints.of_schema(self.json_schema.schema_, f"{field}.schema")


class StructuredOutputs(StrictBody):
    """vLLM's. Exactly one of them."""

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Lark or GBNF.")
    json_object: bool | None = None

    def grammars(self) -> Found:
        """Those that are asked for. Raises InvalidRequest where that is none."""
        asked = list(
            guided("structured_outputs.", self.json_, self.regex, self.choice, self.grammar)
        )
        if self.json_object:
            asked.append(constraints.any_object("structured_outputs.json_object"))
        if not asked:
            raise InvalidRequest("must hold one constraint", field="structured_outputs")
        yield from asked


def guided(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Found:
    """vLLM's four kinds, each under the name of its field. Raises InvalidRequest."""
    if isinstance(schema, str):
        yield constraints.of_schema_text(schema, f"{prefix}json")
    elif schema is not None:
        yield constraints.of_schema(schema, f"{prefix}json")
    if regex is not None:
        yield constraints.of_regex(regex, f"{prefix}regex")
    if choice is not None:
        yield constraints.of_choice(choice, f"{prefix}choice")
    if grammar is not None:
        yield constraints.of_grammar(grammar, f"{prefix}grammar")


def refuse_other_constraints(values: dict[str, Any]) -> None:
    """vLLM's `structured_outputs` knows more than is served here: refused, never dropped."""
    outputs = values.get("structured_outputs")
    if not isinstance(outputs, dict):
        return
    for name in [name for name in outputs if name not in StructuredOutputs.served()]:
        if outputs[name] is not None and outputs[name] is not False:
            raise Unsupported(
                "is not supported by this server", field=join_path("structured_outputs", name)
            )
        del outputs[name]
