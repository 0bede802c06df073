"""What is ready to be sent together leaves together, in order, and ends where it should."""

from core.codec import unwrap_all
from core.messages import Settle, StepOutput, TransferId, Withdraw
from core.stream import Outbox
from protos.tandem.internal.v1 import decode_pb2, scheduler_pb2


def settle(number):
    return Settle(transfer=TransferId(request_id=f"r{number}", attempt=1))


async def test_messages_that_are_ready_together_leave_in_one_and_keep_their_order():
    outbox = Outbox(scheduler_pb2.ScheduleRequest)
    said = [settle(number) for number in range(40)]
    said.append(Withdraw(transfer=TransferId(request_id="r", attempt=1)))
    for message in said:
        outbox.send(message)
    outbox.close()
    sent = [message async for message in outbox]
    assert len(sent) == 1
    assert list(unwrap_all(sent[0])) == said


async def test_one_message_never_brings_more_than_a_bounded_number():
    outbox = Outbox(scheduler_pb2.ScheduleRequest)
    for number in range(200):
        outbox.send(settle(number))
    outbox.close()
    sizes = [1 + len(message.more) async for message in outbox]
    assert sum(sizes) == 200
    assert max(sizes) <= 64


async def test_a_stream_whose_message_brings_no_others_sends_one_by_one():
    outbox = Outbox(decode_pb2.AttachResponse)
    for _ in range(3):
        outbox.send(StepOutput())
    outbox.close()
    assert len([message async for message in outbox]) == 3
