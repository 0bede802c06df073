"""What the gateway can do, whichever protocol asked: answer a chat, continue a text, tokenise."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import Self

from core.config import ClusterConfig, GatewayConfig
from core.errors import DeadlineExceeded, InvalidGrammar, InvalidRequest, RequestNotFound
from core.model_card import ModelCard
from gateway import request_trace
from gateway.backend import Backend, Job, TokenStream
from gateway.bookmark import Place
from gateway.inputs import ChatInput, CompletionInput
from gateway.journal import Journal, Tracked
from gateway.ledger import Ledger
from gateway.limits import QuotaStore
from gateway.loaded_model import LoadedModel, ModelInfo
from gateway.metering import Meter
from gateway.models import Models
from gateway.request_metrics import RequestMetrics
from gateway.request_record import RequestRecord, current
from gateway.request_watch import watched
from gateway.running import RunningRequest, RunningRequests
from gateway.text_stream import TextStream
from gateway.tokenizer import PromptTokenizer
from gateway.validation import Limits, check_token_ids, resolve_sampling


@dataclass(frozen=True, slots=True)
class Resumption:
    """Whether a stream can be taken up again, and from where one is."""

    possible: bool = False
    last: Place | None = None


NOT_RESUMABLE = Resumption()


class InferenceApi:
    """Validates, renders, tokenises, opens a job and gives its text. Both front ends call this.

    The threads of its models end with `close`.
    """

    def __init__(
        self,
        models: Sequence[LoadedModel],
        config: GatewayConfig,
        backend: Backend,
        *,
        quotas: QuotaStore | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.models = Models(models)
        self._backend = backend
        self.running = RunningRequests()
        self._meter = Meter(quotas)
        self._journal = journal

    @classmethod
    def of_one(
        cls,
        card: ModelCard,
        served_name: str,
        config: ClusterConfig,
        backend: Backend,
        *,
        tokenizer: PromptTokenizer | None = None,
        quotas: QuotaStore | None = None,
        metrics: RequestMetrics | None = None,
        journal: Journal | None = None,
    ) -> Self:
        """Over one model; see LoadedModel."""
        model = LoadedModel(card, served_name, config, tokenizer=tokenizer, metrics=metrics)
        return cls([model], config.gateway, backend, quotas=quotas, journal=journal)

    def chat(
        self,
        request: ChatInput,
        *,
        ledger: Ledger,
        remaining_s: float | None = None,
        resumption: Resumption = NOT_RESUMABLE,
    ) -> AbstractAsyncContextManager[TextStream]:
        """The answer to a conversation.

        Entering raises what is wrong with the request, or the backend's refusal; leaving before the
        end cancels the job. `remaining_s` is the client's own deadline, counted from now. Where the
        caller cancels it by its id, entering or the stream raises Cancelled. With `resumption` the
        stream can be taken up again, or is one that is.
        """

        async def prepare(model: LoadedModel, left_s: float) -> tuple[int, ...]:
            return await model.preparation.chat(request, ledger, left_s)

        return self._answer(
            prepare,
            request,
            names=("chatcmpl", "messages"),
            ledger=ledger,
            remaining_s=remaining_s,
            resumption=resumption,
        )

    def complete(
        self,
        request: CompletionInput,
        *,
        ledger: Ledger,
        remaining_s: float | None = None,
        resumption: Resumption = NOT_RESUMABLE,
    ) -> AbstractAsyncContextManager[TextStream]:
        """The continuation of a text; otherwise as `chat`."""

        async def prepare(model: LoadedModel, left_s: float) -> tuple[int, ...]:
            return await model.preparation.completion(request.prompt, ledger, left_s)

        return self._answer(
            prepare,
            request,
            names=("cmpl", "prompt"),
            ledger=ledger,
            remaining_s=remaining_s,
            resumption=resumption,
        )

    async def tokenize(
        self,
        request: ChatInput | CompletionInput,
        *,
        remaining_s: float | None = None,
        prefix: bool = True,
    ) -> tuple[int, ...]:
        """The prompt's token ids, as `chat` or `complete` would read it; raises as they do.

        A text without its `prefix` lacks what the tokenizer puts before every text.
        """
        left_s = self.config.default_timeout_s if remaining_s is None else remaining_s
        await self._meter.request(current())
        model = self._checked(request)
        if isinstance(request, ChatInput):
            return await model.preparation.chat(request, Ledger(), left_s)
        ids = await model.preparation.completion(request.prompt, Ledger(), left_s)
        return ids if prefix else ids[len(model.tokenizer.prefix) :]

    @property
    def limits(self) -> Limits:
        """The widest that any model has, for the description of the API."""
        every = [model.limits for model in self.models.all]
        return replace(
            every[0],
            window=max(each.window for each in every),
            vocab_size=max(each.vocab_size for each in every),
        )

    async def detokenize(
        self, model: str, token_ids: tuple[int, ...], *, field: str = "token_ids"
    ) -> str:
        """The text of token ids, control tokens left out; at most a window of them.

        `field` is what the client calls them.
        """
        await self._meter.request(current())
        found = self.model_named(model)
        check_token_ids(token_ids, field, found.limits)
        return await asyncio.to_thread(found.tokenizer.decode, token_ids)

    def cancel(self, request_id: str) -> None:
        """Cancels what the present caller has under either id of a request.

        Raises RequestNotFound where that is nothing.
        """
        self.running.cancel(request_id, tenant=current().caller.tenant)

    def model_named(self, name: str) -> LoadedModel:
        """The model of this name. Raises ModelNotFound, also where the caller may not use it."""
        return self.models.named(name, current().caller)

    def listed(self) -> list[ModelInfo]:
        """The models that the caller may use."""
        return [model.info for model in self.models.of(current().caller)]

    def close(self) -> None:
        """Lets the worker threads go."""
        for model in self.models.all:
            model.close()

    def _checked(self, request: ChatInput | CompletionInput) -> LoadedModel:
        """The model that is asked, once all is checked that can be before the prompt is made."""
        model = self.model_named(request.model)
        model.check(request)
        return model

    def _metrics(self, name: str) -> RequestMetrics:
        """The metrics of a model; of one that is not served, those without a model's name."""
        found = self.models.known(name)
        return found.metrics if found is not None else self.models.all[0].metrics.of_unknown

    @asynccontextmanager
    async def _answer(
        self,
        prepare: Callable[[LoadedModel, float], Awaitable[tuple[int, ...]]],
        request: ChatInput | CompletionInput,
        *,
        names: tuple[str, str],
        ledger: Ledger,
        remaining_s: float | None,
        resumption: Resumption,
    ) -> AsyncIterator[TextStream]:
        budget_s = self.config.default_timeout_s if remaining_s is None else remaining_s
        end_s = ledger.elapsed_s + budget_s
        id_prefix, prompt_field = names
        running = RunningRequest(f"{id_prefix}-{uuid.uuid4().hex}")
        record = current()
        record.job, record.own_deadline = running.request_id, remaining_s is not None
        operation = "chat" if isinstance(request, ChatInput) else "text_completion"
        async with AsyncExitStack() as held:
            metrics = self._metrics(request.model)
            watch = held.enter_context(watched(metrics, operation, record, ledger))
            held.enter_context(request_trace.blamed(record))
            held.enter_context(_grammar_named(request))
            await self._meter.request(record)
            model = self._checked(request)
            priority = record.caller.priority(request.sampling.priority)
            record.model = model.info.id
            request_trace.describe(record, request.model, model.info.id, request.sampling)
            held.enter_context(
                self.running.entered(running, tenant=record.caller.tenant, label=record.request_id)
            )
            grammar = await running.wait(model.form.grammar(request))
            ledger.validated()
            prompt = await running.wait(prepare(model, _left(end_s, ledger)))
            running.num_tokens = len(prompt)
            asked = request.sampling
            sampling = resolve_sampling(
                asked, model.limits, prompt_tokens=len(prompt), prompt_field=prompt_field
            )
            job = Job(
                request_id=running.request_id,
                model=model.info.id,
                prompt_token_ids=prompt,
                sampling=replace(sampling, grammar=grammar),
                remaining_s=_left(end_s, ledger),
                cache_salt=record.caller.tenant,
                num_choices=asked.n or 1,
                priority=priority,
                trace=record.trace,
            )
            tracked = await running.wait(self._track(job, operation, resumption))
            job = job if tracked is None else tracked.job
            watch.asked(len(prompt), job.sampling.max_new_tokens, job.num_choices)
            charge = await held.enter_async_context(self._meter.prompt(record, len(prompt)))
            ledger.admitted()
            live: TokenStream | None = None
            if tracked is None or tracked.goes_on:
                opened = await running.wait(held.enter_async_context(self._backend.open(job)))
                live = watch.observed(charge.metered(opened), len(prompt))
            stream = live if tracked is None else tracked.stream(live)
            assert stream is not None
            running.begin(stream)
            if tracked is not None:
                held.callback(tracked.close)
                tracked.on_taken = running.cancel
            bookmark = None if tracked is None else tracked.bookmark
            text = TextStream(
                request_id=job.request_id if bookmark is None else bookmark.request_id,
                bookmark=bookmark,
                prompt_token_ids=prompt,
                stream=stream,
                choices=model.choices(
                    request, num_choices=job.num_choices, min_tokens=job.sampling.min_tokens
                ),
                ledger=ledger,
                remaining_s=_left(end_s, ledger),
                running=running,
            )
            held.callback(_account, record, text, ledger)
            yield text

    def resumption(self, *, streamed: bool, last: str | None) -> Resumption:
        """What a client may do, or does, about a stream that is cut off.

        `last` is its Last-Event-ID. Raises InvalidRequest or RequestNotFound.
        """
        if last is None:
            return Resumption(streamed and self._journal is not None)
        if not streamed:
            raise InvalidRequest("only a streamed answer can be resumed", field="Last-Event-ID")
        if self._journal is None:
            raise RequestNotFound("streams cannot be resumed here: gateway.resume is off")
        return Resumption(True, Place.parse(last))

    async def _track(self, job: Job, kind: str, resumption: Resumption) -> Tracked | None:
        """The stream's record; None where there is none. Raises as Journal.track does."""
        sampling = job.sampling
        if self._journal is None or not resumption.possible:
            return None
        if sampling.logprobs or sampling.prompt_logprobs:
            if resumption.last is None:
                return None
            raise RequestNotFound("streams with log probabilities cannot be resumed")
        return await self._journal.track(job, kind=kind, last=resumption.last)


@contextmanager
def _grammar_named(request: ChatInput | CompletionInput) -> Iterator[None]:
    """Says in which field the grammar stands that a worker found impossible to hold."""
    try:
        yield
    except InvalidGrammar as error:
        if error.field is not None:
            raise
        field = "tools" if request.grammar is None else request.grammar.field
        raise InvalidGrammar(error.message, field=field) from error


def _account(record: RequestRecord, text: TextStream, ledger: Ledger) -> None:
    """What came of the request, for the access log."""
    record.completion_tokens = text.usage.completion_tokens
    record.ttft_s = ledger.close().ttft_s or None
    request_trace.account(record, text.usage.cached_tokens, text.stop_reasons)


def _left(end_s: float, ledger: Ledger) -> float:
    left_s = end_s - ledger.elapsed_s
    if left_s <= 0:
        raise DeadlineExceeded("the request's time ran out")
    return left_s
