"""Telling a model of its tools: by its own chat template, or in a system message of ours."""

import json
from collections.abc import Callable
from typing import Any

from gateway.inputs import ChatMessage, Tool, ToolCall
from gateway.tools.dialects import HERMES_CLOSE, HERMES_OPEN

Mask = Callable[[str], str]


def definition(tool: Tool, mask: Mask) -> dict[str, Any]:
    """A tool as chat templates take it; everything in it that came from the client is masked."""
    function: dict[str, Any] = {"name": mask(tool.name)}
    if tool.description is not None:
        function["description"] = mask(tool.description)
    function["parameters"] = masked(
        tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}},
        mask,
    )
    return {"type": "function", "function": function}


def call(made: ToolCall, mask: Mask) -> dict[str, Any]:
    """A call as chat templates take it: arguments as an object, since most print them as JSON."""
    function = {"name": mask(made.name), "arguments": masked(json.loads(made.arguments), mask)}
    return {"id": mask(made.id), "type": "function", "function": function}


def masked(value: Any, mask: Mask) -> Any:
    """The same JSON value with every text and every key in it masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {mask(key): masked(item, mask) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, mask) for item in value]
    return value


def in_words(messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...]) -> tuple[ChatMessage, ...]:
    """A conversation for a template that knows no tools: all of it is said in plain messages.

    The tools stand at the end of the system message, calls in the assistant's words as Hermes
    writes them, and their results in the user's.
    """
    spoken = [_spoken(message) for message in messages]
    if not tools:
        return tuple(spoken)
    first = spoken[0] if spoken and spoken[0].role in ("system", "developer") else None
    told = _told(tools) if first is None else f"{first.content}\n\n{_told(tools)}"
    system = ChatMessage(role="system", content=told)
    return (system, *spoken[0 if first is None else 1 :])


def _told(tools: tuple[Tool, ...]) -> str:
    listed = "\n".join(
        json.dumps(definition(tool, lambda text: text), ensure_ascii=False) for tool in tools
    )
    return (
        "You may call functions. These are their descriptions, one JSON object a line:\n"
        f"{listed}\n"
        "To call one, write its name and arguments as a JSON object between tags:\n"
        f'{HERMES_OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{HERMES_CLOSE}'
    )


def _spoken(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        answer = f"<tool_response>\n{message.content}\n</tool_response>"
        return ChatMessage(role="user", content=answer)
    if not message.tool_calls:
        return message
    parts = [message.content] if message.content else []
    for made in message.tool_calls:
        name = json.dumps(made.name, ensure_ascii=False)
        body = f'{{"name": {name}, "arguments": {made.arguments}}}'
        parts.append(f"{HERMES_OPEN}\n{body}\n{HERMES_CLOSE}")
    return ChatMessage(role=message.role, content="\n".join(parts))
