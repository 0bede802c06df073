"""Calls of tools in OpenAI's shapes: whole in a message, in pieces in a stream's deltas."""

from collections.abc import Callable, Sequence
from typing import Any

from gateway.tools.calls import ArgumentsPiece, CallBegun, TextPiece, ToolEvent
from gateway.tools.reading import CallReading

Delta = dict[str, Any]


def call_deltas(reading: CallReading, text: str, *, last: bool) -> list[Delta]:
    """What became certain with this text. A call's id and name come once, with its first."""
    return [_delta(event, reading.new_id) for event in reading.read(text, last=last)]


def call_message(reading: CallReading, text: str) -> Delta:
    """The whole answer. Where a call in it is not sound, all of it is text as it came."""
    events = reading.read(text, last=True)
    if not reading.called:
        return {"content": text}
    content = "".join(each.text for each in events if isinstance(each, TextPiece))
    return {"content": content or None, "tool_calls": _calls(events, reading.new_id)}


def _delta(event: ToolEvent, new_id: Callable[[], str]) -> Delta:
    match event:
        case TextPiece(text):
            return {"content": text}
        case CallBegun(index, name):
            call = {"index": index, **_call(new_id(), name)}
        case ArgumentsPiece(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def _calls(events: Sequence[ToolEvent], new_id: Callable[[], str]) -> list[Delta]:
    calls: list[Delta] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(_call(new_id(), event.name))
        elif isinstance(event, ArgumentsPiece):
            calls[event.index]["function"]["arguments"] += event.text
    return calls


def _call(call_id: str, name: str) -> Delta:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
