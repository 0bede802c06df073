"""The gRPC front end: tandem.v1.InferenceService over one `InferenceApi`."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from core.errors import Cancelled
from gateway import grpc_codec as codec
from gateway.api import InferenceApi
from gateway.choice_text import TextEvent
from gateway.grpc_call import Context, Write, streamed, unary
from gateway.ledger import Ledger
from gateway.request_record import current
from gateway.text_stream import TextStream, Usage
from gateway.tools.reading import CallReading
from protos.tandem.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
R = TypeVar("R", pb.ChatResponse, pb.GenerateResponse)
M = TypeVar("M", bound=Message)
Q = TypeVar("Q")
# Beyond this, reading a message would hold the event loop up for milliseconds.
_INLINE_BYTES = 16 * 1024
_NOTHING = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)


class InferenceService:
    """The calls of the service. A client that cancels, or whose deadline passes, ends the job."""

    name = SERVICE

    def __init__(self, api: InferenceApi) -> None:
        self._api = api

    async def chat(self, request: pb.ChatRequest, context: Context, write: Write) -> None:
        """Answers a conversation."""
        ledger = current().ledger()
        remaining_s = context.time_remaining()
        asked = await _read(codec.chat_input, request)
        opened = self._api.chat(asked, ledger=ledger, remaining_s=remaining_s)
        await _respond(
            opened,
            ledger,
            write,
            pb.ChatResponse,
            lambda: self._api.model_named(asked.model).form.readings(asked),
        )

    async def generate(self, request: pb.GenerateRequest, context: Context, write: Write) -> None:
        """Continues a text."""
        ledger = current().ledger()
        remaining_s = context.time_remaining()
        asked = await _read(codec.completion_input, request)
        opened = self._api.complete(asked, ledger=ledger, remaining_s=remaining_s)
        await _respond(opened, ledger, write, pb.GenerateResponse)

    async def cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Ends a request of the same caller."""
        self._api.cancel(request.request_id)
        return pb.CancelResponse()

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The token ids of a prompt."""
        prompt = await _read(codec.prompt_input, request)
        token_ids = await self._api.tokenize(prompt, remaining_s=context.time_remaining())
        window = self._api.model_named(prompt.model).info.context_window
        return pb.TokenizeResponse(token_ids=token_ids, context_window=window)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        text = await self._api.detokenize(request.model, tuple(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def list_models(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Names the models that the caller may use."""
        listed = self._api.listed()
        return pb.ListModelsResponse(
            models=[codec.model_proto(model, name) for model in listed for name in model.names]
        )

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes one model."""
        found = self._api.model_named(request.model).info
        return pb.GetModelResponse(model=codec.model_proto(found, request.model))

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server registers. Requests are parsed, and their size held, by `grpc_call`."""
        max_bytes = self._api.config.max_body_bytes
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Chat": streamed(self.chat, pb.ChatRequest, max_bytes),
                "Generate": streamed(self.generate, pb.GenerateRequest, max_bytes),
                "Cancel": unary(self.cancel, pb.CancelRequest, max_bytes),
                "Tokenize": unary(self.tokenize, pb.TokenizeRequest, max_bytes),
                "Detokenize": unary(self.detokenize, pb.DetokenizeRequest, max_bytes),
                "ListModels": unary(self.list_models, pb.ListModelsRequest, max_bytes),
                "GetModel": unary(self.get_model, pb.GetModelRequest, max_bytes),
            },
        )


async def _read(read: Callable[[M], Q], request: M) -> Q:
    """Raises InvalidRequest. A large message is read beside the event loop."""
    inline = request.ByteSize() <= _INLINE_BYTES
    return read(request) if inline else await asyncio.to_thread(read, request)


async def _respond(
    opened: AbstractAsyncContextManager[TextStream],
    ledger: Ledger,
    write: Write,
    kind: type[R],
    begin: Callable[[], Sequence[CallReading]] = tuple,
) -> None:
    usage, request_id = _NOTHING, current().request_id
    try:
        async with opened as stream:
            request_id, readings = stream.request_id, begin()
            try:
                async for event in stream:
                    if isinstance(event, TextEvent):
                        if event.prompt_logprobs:
                            for told in codec.prompt_logprobs(event.prompt_logprobs):
                                await write(kind(prompt_logprobs=told))
                        response = kind()  # filled in place: half of what the two of them cost
                        codec.fill_delta(response.delta, event, readings)
                        await write(response)
                    else:
                        last = codec.finished(event, request_id)
            finally:
                usage = stream.usage
    except Cancelled:
        last = codec.cancelled(usage, ledger.close(), request_id)
    await write(kind(finished=last))
