"""Each error has one status, and is the same error on the other side of a boundary."""

import grpc
import pytest

from core import errors
from core.errors import STATUS, TandemError, from_failure, status_of, to_failure
from core.messages import Failure, WorkerRef


def _below(kind: type[TandemError]) -> set[type[TandemError]]:
    return {kind}.union(*(_below(child) for child in kind.__subclasses__()))


NAMED = {kind for kind in _below(TandemError) - {TandemError} if kind.__module__ == errors.__name__}


def test_the_table_has_every_error():
    assert set(STATUS) == NAMED


def test_no_two_errors_share_a_code():
    assert len({kind.code for kind in NAMED}) == len(NAMED)


@pytest.mark.parametrize("kind", sorted(NAMED, key=lambda kind: kind.__name__))
def test_an_error_survives_the_wire(kind: type[TandemError]):
    culprit = WorkerRef(name="decode-0", incarnation="ab")
    back = from_failure(to_failure(kind("why", culprit=culprit)))
    assert (type(back), back.message, back.culprit) == (kind, "why", culprit)


@pytest.mark.parametrize("kind", sorted(NAMED, key=lambda kind: kind.__name__))
def test_blame_and_status_agree(kind: type[TandemError]):
    status = STATUS[kind]
    not_found = errors.ModelNotFound | errors.RequestNotFound
    refused = errors.InvalidRequest | not_found | errors.Unauthenticated
    clients_fault = issubclass(kind, refused)
    clients_doing = kind in (errors.Cancelled, errors.RateLimited, errors.SlowReader)
    assert (400 <= status.http < 500) == (clients_fault or clients_doing)
    assert (status.openai_type == "invalid_request_error") == clients_fault
    if issubclass(kind, errors.InvalidRequest):
        assert status.grpc is grpc.StatusCode.INVALID_ARGUMENT


def test_an_error_without_a_name_is_internal_and_says_nothing_of_its_text():
    failure = to_failure(ValueError("the prompt was: secret"))
    assert failure == Failure(code="internal", message="internal error (ValueError)")
    assert status_of(ValueError()) is STATUS[errors.Internal]


def test_a_code_that_this_version_does_not_know_is_internal():
    assert type(from_failure(Failure(code="brand_new", message="m"))) is errors.Internal


def test_a_kind_of_error_inherits_its_parents_status():
    class Narrower(errors.Overloaded):
        pass

    assert status_of(Narrower("full")) is STATUS[errors.Overloaded]
