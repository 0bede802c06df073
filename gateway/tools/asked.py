"""The tools and calls of a request, checked in the same way whichever protocol told of them."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from core.errors import InvalidRequest
from gateway.inputs import Tool, ToolCall, ToolsInput
from gateway.json_body import parse_text

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def checked_tools(
    tools: Iterable[Tool],
    *,
    choice: Literal["auto", "none", "required"],
    named: str | None,
    named_field: str,
    parallel: bool,
) -> ToolsInput:
    """The tools of a conversation. `named` is the one that must be called.

    Raises InvalidRequest where there are too many, names clash or are none, a schema is not one of
    an object, or the choice is none of the tools.
    """
    found: dict[str, Tool] = {}
    for tool in tools:
        if len(found) == MAX_TOOLS:
            raise InvalidRequest(f"may hold at most {MAX_TOOLS} tools", field="tools")
        _check_name(tool.name, f"{tool.path}.name")
        if tool.name in found:
            raise InvalidRequest("stands twice", field=f"{tool.path}.name")
        if (tool.parameters or {}).get("type", "object") != "object":
            raise InvalidRequest("must be the schema of an object", field=f"{tool.path}.parameters")
        found[tool.name] = tool
    asked = ToolsInput(tools=tuple(found.values()), choice=choice, parallel=parallel)
    if named is not None:
        if named not in found:
            raise InvalidRequest("is none of the tools", field=named_field)
        return replace(asked, choice="required", named=named)
    if choice == "required" and not found:
        raise InvalidRequest("needs tools", field="tool_choice")
    return asked


def checked_call(call_id: str, name: str, arguments: str, path: str) -> ToolCall:
    """A call that stands in a conversation, at `path`.

    Raises InvalidRequest where the name is none, or the arguments are not a JSON object.
    """
    _check_name(name, f"{path}.name")
    arguments = arguments.strip() or "{}"
    parse_text(arguments, f"{path}.arguments")
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _check_name(name: str, field: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest("must be 1 to 64 letters, digits, '_', '.' or '-'", field=field)
