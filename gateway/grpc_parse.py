"""Requests off the wire, so that a malformed one is INVALID_ARGUMENT and names its field.

gRPC answers INTERNAL where a message cannot be parsed. What clients get wrong there is text that
is not UTF-8; parsed once more with every string as bytes, the message shows which text it is. And
gRPC's own answer to a message above its limit holds no details; ours lies below that one.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from core.errors import BodyTooLarge, InvalidRequest
from gateway.json_body import join_path

M = TypeVar("M", bound=Message)


def parser(kind: type[M], max_bytes: int) -> Callable[[bytes], M | InvalidRequest]:
    """A deserialiser that gives the error back instead of raising it."""

    def parse(raw: bytes) -> M | InvalidRequest:
        if len(raw) > max_bytes:
            return BodyTooLarge(f"the message has {len(raw)} bytes; at most {max_bytes} are read")
        try:
            return kind.FromString(raw)
        except DecodeError:
            return _diagnose(kind, raw)

    return parse


def _diagnose(kind: type[Message], raw: bytes) -> InvalidRequest:
    try:
        loose = _loose_twin(kind.DESCRIPTOR.full_name).FromString(raw)
    except DecodeError:
        return InvalidRequest(f"the message is no {kind.DESCRIPTOR.full_name}")
    for path in _broken_texts(loose, ""):
        return InvalidRequest("is not UTF-8", field=path)
    return InvalidRequest(f"the message is no {kind.DESCRIPTOR.full_name}")


@functools.cache
def _loose_twin(name: str) -> type[Message]:
    """The message type of this name with bytes in the place of strings."""
    file = descriptor_pb2.FileDescriptorProto()
    descriptor_pool.Default().FindMessageTypeByName(name).file.CopyToProto(file)
    del file.service[:]
    for message in file.message_type:
        for field in message.field:
            if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_STRING:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _broken_texts(message: Message, path: str) -> Iterator[str]:
    for field, value in message.ListFields():
        if isinstance(value, Mapping):
            continue  # maps of ours hold numbers
        values = list(value) if field.is_repeated else [value]
        for i, item in enumerate(values):
            where = join_path(path, field.name)
            where = join_path(where, i) if field.is_repeated else where
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from _broken_texts(item, where)
            elif field.type == FieldDescriptor.TYPE_BYTES and not _is_utf8(item):
                yield where


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
