"""Protobuf <-> dataclass, by reflection over equal names.

`to_proto(pb_class, obj)` and `from_proto(cls, message)` convert one message. A stream whose
message is a oneof is converted by `wrap(pb_class, obj)` and `unwrap(message)`: the oneof's member
is the one whose message has the dataclass's name. A stream's message with a field `more` brings
others that were ready at the same time; `unwrap_all` gives them all. Converters are built once per
class; a field that only one side has raises TypeError there.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from core import messages

M = TypeVar("M", bound=Message)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# A field descriptor of protobuf: which class it has depends on protobuf's implementation.
FieldDescriptor = Any


def _once(build: F) -> F:
    """functools.cache with the signature kept: mypy takes message classes for unhashable."""
    return typing.cast(F, functools.cache(build))


def to_proto(pb_class: type[M], obj: Any) -> M:
    """The protobuf message that says what the dataclass says."""
    result = pb_class()
    _writer(type(obj), pb_class)(obj, result)
    return result


def from_proto(cls: type[T], message: Message) -> T:
    """The dataclass that says what the protobuf message says."""
    built = _reader(cls, type(message))(message)
    return typing.cast(T, built)


def wrap(pb_class: type[M], obj: Any) -> M:
    """Puts a dataclass into the oneof of a stream's message."""
    field = _members(pb_class)[type(obj).__name__]
    result = pb_class()
    member = getattr(result, field.name)
    member.SetInParent()
    _writer(type(obj), type(member))(obj, member)
    return result


def unwrap(message: Message) -> Any:
    """Takes the dataclass out of a stream's message; None where the peer knows a newer kind."""
    descriptor: Any = message.DESCRIPTOR
    name = message.WhichOneof(descriptor.oneofs[0].name)
    if name is None:
        return None
    member = getattr(message, name)
    return from_proto(getattr(messages, member.DESCRIPTOR.name), member)


def unwrap_all(message: Any) -> Iterator[Any]:
    """What a stream's message brings, in order. What the peer alone knows is left out."""
    first = unwrap(message)
    if first is not None:
        yield first
    if carries_more(type(message)):
        for each in message.more:
            yield from unwrap_all(each)


@_once
def carries_more(pb_class: type[Message]) -> bool:
    """Whether one message of this stream can bring several."""
    return "more" in pb_class.DESCRIPTOR.fields_by_name


@_once
def _members(pb_class: type[Message]) -> dict[str, FieldDescriptor]:
    fields: Sequence[FieldDescriptor] = pb_class.DESCRIPTOR.oneofs[0].fields
    return {field.message_type.name: field for field in fields}


def _fields(cls: type, pb_class: type[Message]) -> list[tuple[str, Any, FieldDescriptor]]:
    hints = typing.get_type_hints(cls)
    ours = [field.name for field in dataclasses.fields(cls)]
    theirs: Mapping[str, FieldDescriptor] = pb_class.DESCRIPTOR.fields_by_name
    if set(ours) != set(theirs):
        raise TypeError(f"{cls.__name__} and its protobuf differ in {set(ours) ^ set(theirs)}")
    return [(name, hints[name], theirs[name]) for name in ours]


def _plain(hint: Any) -> Any:
    """The type inside `X | None` or `tuple[X, ...]`, or the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (typing.Union, tuple):
        return next(arg for arg in typing.get_args(hint) if arg not in (type(None), Ellipsis))
    return hint


@_once
def _writer(cls: type, pb_class: type[Message]) -> Callable[[Any, Message], None]:
    scalars: list[str] = []
    repeated: list[str] = []
    nested: list[tuple[str, bool, Callable[[Any, Any], None]]] = []
    for name, hint, field in _fields(cls, pb_class):
        if field.message_type is not None:
            write = _writer(_plain(hint), field.message_type._concrete_class)
            nested.append((name, field.is_repeated, write))
        elif field.is_repeated:
            repeated.append(name)
        else:
            scalars.append(name)

    def write_all(obj: Any, message: Message) -> None:
        for name in scalars:
            setattr(message, name, getattr(obj, name))
        for name in repeated:
            getattr(message, name).extend(getattr(obj, name))
        for name, many, write in nested:
            value = getattr(obj, name)
            if many:
                target = getattr(message, name)
                for item in value:
                    write(item, target.add())
            elif value is not None:
                member = getattr(message, name)
                member.SetInParent()
                write(value, member)

    return write_all


@_once
def _reader(cls: type, pb_class: type[Message]) -> Callable[[Any], Any]:
    parts: list[tuple[str, Callable[[Any], Any]]] = []
    for name, hint, field in _fields(cls, pb_class):
        parts.append((name, _field_reader(name, hint, field)))

    def read_all(message: Any) -> Any:
        return cls(**{name: read(message) for name, read in parts})

    return read_all


def _field_reader(name: str, hint: Any, field: FieldDescriptor) -> Callable[[Any], Any]:
    inner = _plain(hint)
    if field.message_type is not None:
        read = _reader(inner, field.message_type._concrete_class)
        if field.is_repeated:
            return lambda message: tuple(read(item) for item in getattr(message, name))
        if inner is hint:  # not optional: an absent message is read as its defaults
            return lambda message: read(getattr(message, name))
        return lambda message: read(getattr(message, name)) if message.HasField(name) else None
    if isinstance(inner, type) and issubclass(inner, IntEnum):
        known = {int(member): member for member in inner}
        return lambda message: known.get(getattr(message, name), inner(0))
    if field.is_repeated:
        return lambda message: tuple(getattr(message, name))
    return lambda message: getattr(message, name)
