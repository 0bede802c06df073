"""What a scheduler was told and what it answered: kept, stored, and told to another one.

A stored log has one JSON line for each entry: the time, what happened, the message as the wire has
it (protobuf's JSON), and the worker that it is of. The first line is the scheduler's settings.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from core import codec
from core.config import SchedulerConfig
from core.errors import InvalidRequest
from core.messages import Placement, WorkerRef
from protos.tandem.internal.v1 import scheduler_pb2
from scheduler.cluster import Member
from scheduler.desk import SchedulerDesk

_STREAMS: dict[str, type[Message]] = {
    "joined": scheduler_pb2.RegisterRequest,
    "load": scheduler_pb2.RegisterRequest,
    "cached": scheduler_pb2.RegisterRequest,
    "said": scheduler_pb2.ScheduleRequest,
    "reply": scheduler_pb2.ScheduleResponse,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`kind`: joined, load, cached, left, said, decide, or reply."""

    time_s: float
    kind: str
    message: Any = None
    worker: WorkerRef | None = None


class EventLog:
    """Entries in the order in which they happened."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.entries: list[Entry] = []

    def add(self, time_s: float, kind: str, message: object, worker: WorkerRef | None) -> None:
        """One more."""
        self.entries.append(Entry(time_s=time_s, kind=kind, message=message, worker=worker))

    def store(self, path: Path) -> None:
        """Writes the file."""
        with path.open("w") as lines:
            lines.write(json.dumps({"config": self.config.model_dump(mode="json")}) + "\n")
            lines.writelines(json.dumps(_line(entry)) + "\n" for entry in self.entries)

    @classmethod
    def load(cls, path: Path) -> "EventLog":
        """Reads it. Raises InvalidRequest that names the row."""
        with path.open() as lines:
            try:
                log = cls(SchedulerConfig.model_validate_json(json.dumps(_head(lines))))
            except ValueError as error:
                raise InvalidRequest(f"{path}: row 1: no settings: {error}", field="log") from error
            for number, line in enumerate(lines, 2):
                try:
                    log.entries.append(_entry(json.loads(line)))
                except (ValueError, KeyError, TypeError, json_format.ParseError) as error:
                    raise InvalidRequest(
                        f"{path}: row {number}: no event: {error}", field="log"
                    ) from error
        return log


class _Replay:
    """A scheduler that is told again."""

    def __init__(self, log: EventLog, desk: SchedulerDesk) -> None:
        self._desk = desk
        self._members: dict[WorkerRef, Member] = {}
        self.replies: list[Any] = []

    def tell(self, entry: Entry) -> None:
        """One entry. What was answered then is not told."""
        match entry.kind:
            case "said":
                self._desk.gateway_says("gateway", entry.message, self._reply)
            case "joined":
                worker = entry.message.endpoint.worker
                self._members[worker] = self._desk.worker_joined(entry.message)
            case "load":
                self._desk.worker_says(self._members[_of(entry)], entry.message)
            case "cached":
                self._desk.worker_cached(self._members[_of(entry)], entry.message)
            case "left":
                self._desk.worker_left(self._members.pop(_of(entry)))
            case "decide":
                self._desk.decide_now()

    def _reply(self, message: Any) -> bool:
        self.replies.append(message)
        return True


def replayed(log: EventLog, make_desk: Any) -> list[Any]:
    """What another scheduler answers to the log. `make_desk(config, clock)` makes it."""
    now_s = 0.0
    replay = _Replay(log, make_desk(log.config, lambda: now_s))
    for entry in log.entries:
        now_s = entry.time_s
        replay.tell(entry)
    return [unsigned(message) for message in replay.replies]


def recorded(log: EventLog) -> list[Any]:
    """What the log's own scheduler answered."""
    return [unsigned(entry.message) for entry in log.entries if entry.kind == "reply"]


def unsigned(message: Any) -> Any:
    """Without its ticket, which another secret signs otherwise."""
    return replace(message, ticket=None) if isinstance(message, Placement) else message


def _of(entry: Entry) -> WorkerRef:
    if entry.worker is None:
        raise InvalidRequest(f"an event {entry.kind} without its worker", field="log")
    return entry.worker


def _head(lines: Iterator[str]) -> Any:
    return json.loads(next(lines, "null"))["config"]


def _line(entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {"time_s": entry.time_s, "kind": entry.kind}
    if entry.message is not None:
        wire = codec.wrap(_STREAMS[entry.kind], entry.message)
        line["message"] = json_format.MessageToDict(wire, preserving_proto_field_name=True)
    if entry.worker is not None:
        line["worker"] = [entry.worker.name, entry.worker.incarnation]
    return line


def _entry(line: dict[str, Any]) -> Entry:
    message = None
    if "message" in line:
        wire = json_format.ParseDict(line["message"], _STREAMS[line["kind"]]())
        message = codec.unwrap(wire)
    name, incarnation = line.get("worker") or ("", "")
    return Entry(
        time_s=float(line["time_s"]),
        kind=line["kind"],
        message=message,
        worker=WorkerRef(name=name, incarnation=incarnation) if name else None,
    )
