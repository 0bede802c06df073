"""tandem.v1's words for tools, calls of them, and what an answer must be.

Everything here raises InvalidRequest, or a kind of it, that names the message's field.
"""

from collections.abc import Sequence
from typing import Literal

from core.errors import InvalidRequest
from gateway import constraints
from gateway.inputs import GrammarInput, Tool, ToolCall, ToolsInput
from gateway.json_body import parse_text
from gateway.tools.asked import checked_call, checked_tools
from gateway.tools.calls import ArgumentsPiece, CallBegun, TextPiece, ToolEvent
from gateway.tools.reading import CallReading
from protos.tandem.v1 import inference_pb2 as pb

Choice = Literal["auto", "none", "required"]
_MODES: dict[int, Choice] = {
    pb.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def tools_input(request: pb.ChatRequest) -> ToolsInput:
    """The tools of a chat, and the choice among them."""
    choice: Choice = "auto"
    named = None
    if request.HasField("tool_choice"):
        match request.tool_choice.WhichOneof("choice"):
            case "mode":
                choice = _mode(request.tool_choice.mode)
            case "name":
                named = request.tool_choice.name
            case _:
                raise InvalidRequest("must hold a mode or a name", field="tool_choice")
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    return _checked(request.tools, choice=choice, named=named, parallel=parallel)


def told_tools(tools: Sequence[pb.Tool]) -> ToolsInput:
    """Tools that a conversation is rendered with."""
    return _checked(tools, choice="auto", named=None, parallel=True)


def calls_input(message: pb.ChatMessage, path: str) -> tuple[ToolCall, ...]:
    """The calls that stand in a message."""
    return tuple(
        checked_call(call.id, call.name, call.arguments, f"{path}.tool_calls[{i}]")
        for i, call in enumerate(message.tool_calls)
    )


def answer_format(request: pb.ChatRequest | pb.GenerateRequest) -> GrammarInput | None:
    """What the answer is held to; None where it may be any text."""
    if not request.HasField("answer_format"):
        return None
    asked = request.answer_format
    kind = asked.WhichOneof("format")
    field = f"answer_format.{kind}"
    match kind:
        case "json_schema":
            return constraints.of_schema_text(asked.json_schema, field)
        case "json_object":
            return constraints.any_object(field)
        case "regex":
            return constraints.of_regex(asked.regex, field)
        case "choice":
            return constraints.of_choice(asked.choice.texts, field)
        case "grammar":
            return constraints.of_grammar(asked.grammar, field)
    raise InvalidRequest("must hold one format", field="answer_format")


def fill_pieces(delta: pb.TextDelta, reading: CallReading, text: str, *, last: bool) -> None:
    """Writes what became certain of an answer that may call tools into a delta of it."""
    for event in reading.read(text, last=last):
        _fill(delta, event, reading)
    delta.calls_complete = last and reading.called


def _fill(delta: pb.TextDelta, event: ToolEvent, reading: CallReading) -> None:
    match event:
        case TextPiece(text):
            delta.text += text
        case CallBegun(index, name):
            delta.tool_calls.add(index=index, id=reading.new_id(), name=name)
        case ArgumentsPiece(index, text):
            calls = delta.tool_calls
            if calls and calls[-1].index == index:
                calls[-1].arguments += text
            else:
                calls.add(index=index, arguments=text)


def _mode(mode: int) -> Choice:
    if mode not in _MODES:
        raise InvalidRequest("is not a mode that is known here", field="tool_choice.mode")
    return _MODES[mode]


def _checked(
    tools: Sequence[pb.Tool], *, choice: Choice, named: str | None, parallel: bool
) -> ToolsInput:
    return checked_tools(
        (_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)),
        choice=choice,
        named=named,
        named_field="tool_choice.name",
        parallel=parallel,
    )


def _tool(tool: pb.Tool, path: str) -> Tool:
    has_parameters = tool.HasField("parameters")
    return Tool(
        name=tool.name,
        description=tool.description if tool.HasField("description") else None,
        parameters=parse_text(tool.parameters, f"{path}.parameters") if has_parameters else None,
        strict=tool.strict,
        path=path,
    )
