"""Every message crosses a process boundary unchanged."""

import dataclasses
import enum
import typing
from types import UnionType
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import messages
from core.codec import from_proto, to_proto, unwrap, wrap
from protos.tandem.internal.v1 import common_pb2, decode_pb2, prefill_pb2, scheduler_pb2

MODULES = (common_pb2, scheduler_pb2, decode_pb2, prefill_pb2)
MESSAGES = {
    name: found
    for name, found in vars(messages).items()
    if dataclasses.is_dataclass(found) and found.__module__ == messages.__name__
}
STREAMS = {
    name: getattr(module, name)
    for module in MODULES
    for name, found in module.DESCRIPTOR.message_types_by_name.items()
    if found.oneofs and name.endswith(("Request", "Response"))
}


def _protobuf(name: str) -> type[Message]:
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def _values(cls: type, descriptor: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    fields = descriptor.fields_by_name
    return st.builds(
        cls,
        **{
            field.name: _value(hints[field.name], fields[field.name])
            for field in dataclasses.fields(cls)
        },
    )


def _value(hint: Any, field: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, UnionType):  # X | None
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return st.none() | _value(inner, field)
    if typing.get_origin(hint) is tuple:
        return st.lists(_value(typing.get_args(hint)[0], field), max_size=3).map(tuple)
    if dataclasses.is_dataclass(hint):
        return _values(hint, field.message_type)
    if issubclass(hint, enum.IntEnum):
        return st.sampled_from(hint)
    return {
        bool: st.booleans(),
        int: _integers(field),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
    }[hint]


def _integers(field: Any) -> st.SearchStrategy[int]:
    """All that the field's type on the wire can hold."""
    if field.type in (field.TYPE_FIXED64, field.TYPE_UINT64):
        return st.integers(0, 2**64 - 1)
    bits = 32 if field.cpp_type == field.CPPTYPE_INT32 else 64
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("name", MESSAGES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_comes_back_as_it_was(name: str, data: st.DataObject):
    cls, pb_class = MESSAGES[name], _protobuf(name)
    sent = data.draw(_values(cls, pb_class.DESCRIPTOR))
    received = pb_class.FromString(to_proto(pb_class, sent).SerializeToString())
    assert from_proto(cls, received) == sent


@pytest.mark.parametrize("name", STREAMS)
def test_every_kind_of_message_of_a_stream_is_told_apart(name: str):
    pb_class = STREAMS[name]
    for field in pb_class.DESCRIPTOR.oneofs[0].fields:
        cls = MESSAGES[field.message_type.name]
        sent = from_proto(cls, _protobuf(cls.__name__)())
        received = pb_class.FromString(wrap(pb_class, sent).SerializeToString())
        assert received.WhichOneof(pb_class.DESCRIPTOR.oneofs[0].name) == field.name
        assert unwrap(received) == sent


def test_a_kind_of_message_that_this_version_does_not_know_is_none():
    assert unwrap(decode_pb2.AttachRequest()) is None


def test_an_enum_value_that_this_version_does_not_know_reads_as_unspecified():
    newer = decode_pb2.Ended.FromString(b"\x10\x63")  # field 2, varint 99
    assert from_proto(messages.Ended, newer).reason is messages.StopReason.UNSPECIFIED


def test_a_field_that_only_one_side_has_is_an_error():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WorkerRef:
        name: str
        colour: str

    with pytest.raises(TypeError, match=r"WorkerRef .*(colour|incarnation)"):
        to_proto(common_pb2.WorkerRef, WorkerRef(name="a", colour="red"))


def test_prompts_and_secrets_stay_out_of_a_messages_repr():
    me = messages.WorkerRef(name="d", incarnation="1")
    start = messages.Start(
        transfer=messages.TransferId(request_id="r", attempt=1),
        decode=me,
        prefill=messages.Endpoint(worker=me, address="unix:x"),
        prompt_token_ids=(987654,),
        sampling=messages.SamplingParams(),
        remaining_s=1.0,
    )
    offer = messages.TransportOffer(name="tcp", address="h:1", payload=b"hush")
    assert "987654" not in repr(start)
    assert "hush" not in repr(offer)
