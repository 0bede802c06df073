"""Tools as chat bodies say them: definitions, the choice among them, and calls in messages."""

from typing import Any, Literal

from pydantic import Field

from gateway.inputs import Tool, ToolCall, ToolsInput
from gateway.strict_body import StrictBody
from gateway.tools.asked import checked_call, checked_tools


class FunctionBody(StrictBody):
    name: str = Field(description="Letters, digits, _, . and -; at most 64.")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema; absent: no arguments")
    strict: bool | None = Field(
        None,
        description="Arguments are held to the schema even where calling is free. Default false.",
    )


class ToolBody(StrictBody):
    type: Literal["function"]
    function: FunctionBody


class NameBody(StrictBody):
    name: str


class ChoiceBody(StrictBody):
    type: Literal["function"]
    function: NameBody


class CalledBody(StrictBody):
    name: str
    arguments: str = Field(description="The text of a JSON object.")


class CallBody(StrictBody):
    id: str
    type: Literal["function"]
    function: CalledBody

    def to_input(self, path: str) -> ToolCall:
        """Raises InvalidRequest where the name or the arguments are none."""
        function = self.function
        return checked_call(self.id, function.name, function.arguments, f"{path}.function")


def tools_input(
    tools: list[ToolBody] | None,
    choice: Literal["none", "auto", "required"] | ChoiceBody | None,
    parallel: bool | None,
) -> ToolsInput:
    """Raises InvalidRequest where names clash or the choice is none of the tools."""
    named = choice.function.name if isinstance(choice, ChoiceBody) else None
    return checked_tools(
        (_tool(each.function, f"tools[{i}].function") for i, each in enumerate(tools or ())),
        choice="auto" if choice is None or isinstance(choice, ChoiceBody) else choice,
        named=named,
        named_field="tool_choice.function.name",
        parallel=parallel is not False,
    )


def _tool(function: FunctionBody, path: str) -> Tool:
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
        path=path,
    )
