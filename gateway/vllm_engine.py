"""vllm.grpc.engine.VllmEngine: the token-level protocol by which smg's router drives its engines.

To the router a whole cluster is one worker. It renders, tokenises and detokenises itself, and sends
token ids; the tokenizer it can have from here.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from core.config import ClusterConfig
from core.errors import Cancelled, InvalidRequest, RequestNotFound
from core.model_card import ModelCard
from gateway import vllm_engine_codec as codec
from gateway.api import InferenceApi
from gateway.choice_text import TextEvent
from gateway.grpc_call import Context, Write, streamed, unary
from gateway.inputs import CompletionInput
from gateway.request_record import checked_id, current
from gateway.text_stream import DoneEvent, TextStream, Usage
from gateway.vllm_answer import ABORTED, VllmChoice, input_logprobs
from gateway.vllm_engine_codec import pb
from gateway.vllm_tokenizer import TokenizerArchive

SERVICE = "vllm.grpc.engine.VllmEngine"
# The router would look a bare name up on a public hub. A path that it does not have makes it ask
# for the archive.
_NO_FOLDER = "/tandem/get_tokenizer"
_NOTHING = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
Message = Any  # of a package without types


class VllmEngine:
    """The calls of the service that a router needs. The others are UNIMPLEMENTED."""

    name = SERVICE

    def __init__(
        self,
        api: InferenceApi,
        card: ModelCard,
        config: ClusterConfig,
        *,
        readiness: Callable[[], tuple[bool, str]],
    ) -> None:
        self._api = api
        self._model = api.models.all[0].info  # the protocol knows one
        self._card = card
        self._config = config
        self._readiness = readiness
        self._archive = TokenizerArchive(card)
        self._started_s = time.monotonic()

    async def generate(self, request: Message, context: Context, write: Write) -> None:
        """Continues token ids; with `stream` as they come, and in the end in one piece."""
        if request.request_id:  # by which Abort names it
            current().request_id = _checked(request.request_id)
        asked = codec.completion_input(request, model=self._model.id)
        ledger = current().ledger()
        opened = self._api.complete(asked, ledger=ledger, remaining_s=context.time_remaining())
        going: dict[int, VllmChoice] | None = None
        usage = _NOTHING
        try:
            async with opened as stream:
                try:
                    async for event in stream:
                        if isinstance(event, DoneEvent):
                            continue
                        if going is None:
                            going = _choices(asked, _scored(asked, stream, event))
                        choice = going[event.choice]
                        choice.add(event)
                        if request.stream and event.token_ids:
                            await write(choice.chunk(event, stream.usage))
                        if event.end is not None:
                            await write(choice.complete(event.end, stream.usage))
                            del going[event.choice]
                finally:
                    usage = stream.usage
        except Cancelled:
            for choice in (_choices(asked) if going is None else going).values():
                await write(choice.complete(ABORTED, usage))

    async def abort(self, request: Message, context: Context) -> Message:
        """Ends requests of the same caller; ids that are not known have ended."""
        for request_id in request.request_ids:
            with suppress(RequestNotFound):
                self._api.cancel(request_id)
        return pb.AbortResponse()

    async def health_check(self, request: Message, context: Context) -> Message:
        """Whether a request can be served now."""
        ready, reason = self._readiness()
        return pb.HealthCheckResponse(healthy=ready, message=reason or "ready")

    async def get_model_info(self, request: Message, context: Context) -> Message:
        """What the router must know of the model."""
        card, model = self._card, self._model
        return pb.GetModelInfoResponse(
            model_path=model.id,
            tokenizer_path=_NO_FOLDER,
            served_model_name=model.id,
            is_generation=True,
            max_context_length=model.context_window,
            max_req_input_len=model.context_window,
            vocab_size=card.vocab_size,
            model_type=card.architecture.lower().removesuffix("forcausallm"),
            architectures=[card.architecture],
            eos_token_ids=card.eos_token_ids,
            bos_token_id=self._archive.bos_token_id or 0,
            pad_token_id=card.eos_token_ids[0] if card.eos_token_ids else 0,
        )

    async def get_server_info(self, request: Message, context: Context) -> Message:
        """What the router must know of this server."""
        return pb.GetServerInfoResponse(
            active_requests=sum(1 for _ in self._api.running),
            uptime_seconds=time.monotonic() - self._started_s,
            last_receive_timestamp=time.time(),
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            model_dtype=f"torch.{self._config.engine.dtype}",
            block_size=self._config.engine.block_size,
            max_num_seqs=self._max_seqs,
            constrained_decoding_start="first_token",
        )

    async def get_loads(self, request: Message, context: Context) -> Message:
        """This gateway's own requests; those of other gateways of the cluster are not in it."""
        requests = list(self._api.running)
        begun = sum(request.begun for request in requests)
        waiting = [request.num_tokens for request in requests if not request.begun]
        load = pb.SchedulerLoad(
            num_running_reqs=begun,
            num_waiting_reqs=len(waiting),
            num_total_reqs=len(requests),
            num_used_tokens=sum(request.num_tokens for request in requests if request.begun),
            num_waiting_uncached_tokens=sum(waiting),
            max_running_requests=self._max_seqs,
            utilization=begun / self._max_seqs,
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version="tandem", dp_rank_count=1, loads=[load])

    async def get_tokenizer(self, request: Message, context: Context, write: Write) -> None:
        """The tokenizer and chat template as a zip archive, in pieces; its digest with the last."""
        async for piece, digest in self._archive.pieces():
            await write(common_pb2.GetTokenizerChunk(data=piece, sha256=digest))

    @property
    def _max_seqs(self) -> int:
        return self._config.engine.max_seqs * self._config.decode_workers

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        size = self._api.config.max_body_bytes
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": streamed(self.generate, pb.GenerateRequest, size),
                "Abort": unary(self.abort, pb.AbortRequest, size),
                "HealthCheck": unary(self.health_check, pb.HealthCheckRequest, size),
                "GetModelInfo": unary(self.get_model_info, pb.GetModelInfoRequest, size),
                "GetServerInfo": unary(self.get_server_info, pb.GetServerInfoRequest, size),
                "GetLoads": unary(self.get_loads, pb.GetLoadsRequest, size),
                "GetTokenizer": streamed(self.get_tokenizer, common_pb2.GetTokenizerRequest, size),
            },
        )


def _choices(asked: CompletionInput, scored: Message = None) -> dict[int, VllmChoice]:
    return {index: VllmChoice(index, scored) for index in range(asked.sampling.n or 1)}


def _scored(asked: CompletionInput, stream: TextStream, first: TextEvent) -> Message:
    """The prompt's log probabilities, which come with the first event; None where nobody asked."""
    if asked.sampling.prompt_logprobs is None:
        return None
    return input_logprobs(stream.prompt_token_ids, first.prompt_logprobs)


def _checked(request_id: str) -> str:
    try:
        return checked_id(request_id)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field="request_id") from error
