"""The HTTP front end: the OpenAI API's routes over one `InferenceApi`."""

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from core.errors import TandemError
from core.telemetry.context import RESPONSE_HEADER
from core.telemetry.tracer import NO_TRACER, Tracer
from gateway.api import InferenceApi
from gateway.auth import Authenticator, authenticator_of
from gateway.http_errors import HttpRefusal, error_response, json_response
from gateway.http_fence import Fence
from gateway.http_gate import REQUEST_ID, KeyCheck, RequestGate
from gateway.http_generation import MakeAnswer, Opened, StreamedAnswer, WholeAnswer
from gateway.http_request import read_request
from gateway.http_tokens import TokenRoutes
from gateway.limits import Resource
from gateway.openai_answers import Answer, ChatAnswer, CompletionAnswer, model_json
from gateway.openai_request import read_chat, read_completion
from gateway.openapi import DISTRIBUTION, DocumentedApp
from gateway.recent import RecentRequests
from gateway.text_stream import TextStream

# Whether requests can be served now, and if not why.
Readiness = Callable[[], tuple[bool, str]]

# What a web page of another origin may send and read. Keys travel in headers, never in cookies, so
# that a page can use none but its own.
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"),
    "allow_headers": ("*",),
    "expose_headers": (
        REQUEST_ID,
        "retry-after",
        "x-tandem-explain",
        "x-tandem-ignored-fields",
        RESPONSE_HEADER,
        *(
            f"x-ratelimit-{what}-{kind}"
            for what in ("limit", "remaining", "reset")
            for kind in Resource
        ),
    ),
}


def create_app(
    api: InferenceApi,
    *,
    readiness: Readiness,
    authenticator: Authenticator | None = None,
    tracer: Tracer = NO_TRACER,
    recent: RecentRequests | None = None,
) -> FastAPI:
    """The ASGI application.

    Without an authenticator, one is made of the configuration; the gRPC server has the same.
    """
    several = api.models.only is None
    app = DocumentedApp(api.config, api.limits, _names(api), several=several)
    # The last one added sees a request first.
    app.add_middleware(KeyCheck, authenticator=authenticator or authenticator_of(api.config))
    app.add_middleware(Fence)
    if origins := api.config.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, **_CORS)
    app.add_middleware(RequestGate, tracer=tracer, recent=recent)
    app.add_exception_handler(HTTPException, _on_http_exception)
    for kind in (TandemError, HttpRefusal):
        app.add_exception_handler(kind, _on_error)
    routes = _Routes(api, readiness)
    generate: dict[str, Any] = {"methods": ["POST"], "response_class": Response}
    app.add_api_route("/v1/chat/completions", routes.chat, **generate)
    app.add_api_route("/v1/completions", routes.completions, **generate)
    tokens = TokenRoutes(api)
    app.add_api_route("/tokenize", tokens.tokenize, **generate)
    app.add_api_route("/detokenize", tokens.detokenize, **generate)
    for path, endpoint in (
        ("/version", routes.version),
        ("/v1/models", routes.models),
        ("/v1/models/{model_id:path}", routes.model),
        ("/healthz", routes.healthz),
        ("/readyz", routes.readyz),
    ):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_class=Response)
    return app


def _names(api: InferenceApi) -> tuple[str, ...]:
    return tuple(name for model in api.models.all for name in model.info.names)


class _Routes:
    def __init__(self, api: InferenceApi, readiness: Readiness) -> None:
        self._api = api
        self._readiness = readiness
        self._keepalive_s = api.config.sse_keepalive_s
        strict = api.config.strict_fields
        self._read_chat = partial(read_chat, strict=strict)
        self._read_completion = partial(read_completion, strict=strict)

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        asked = await read_request(request, self._api.config, self._read_chat)
        if isinstance(asked, Response):
            return asked
        body = asked.body

        def answer(stream: TextStream) -> Answer:
            model = self._api.model_named(body.input.model)
            return ChatAnswer(
                stream.request_id,
                model.info,
                spell=model.token_text,
                include_usage=body.include_usage,
                include_timing=body.include_timing,
                scored=stream.prompt_token_ids if body.prompt_logprobs else (),
                num_choices=body.input.sampling.n or 1,
                created_unix_s=_created(stream),
                readings=model.form.readings(body.input),
            )

        resumption = self._api.resumption(streamed=body.stream, last=asked.last_event_id)
        opened = self._api.chat(body.input, ledger=asked.ledger, resumption=resumption)
        return self._answered(opened, answer, body.stream, asked.headers)

    async def completions(self, request: Request) -> Response:
        """Continues a text."""
        asked = await read_request(request, self._api.config, self._read_completion)
        if isinstance(asked, Response):
            return asked
        body = asked.body

        def answer(stream: TextStream) -> Answer:
            model = self._api.model_named(body.input.model)
            return CompletionAnswer(
                stream.request_id,
                model.info,
                spell=model.token_text,
                include_usage=body.include_usage,
                include_timing=body.include_timing,
                scored=stream.prompt_token_ids if body.prompt_logprobs else (),
                num_choices=body.input.sampling.n or 1,
                created_unix_s=_created(stream),
                echo=model.echo(body.input, stream.prompt_token_ids) if body.echo else None,
            )

        resumption = self._api.resumption(streamed=body.stream, last=asked.last_event_id)
        opened = self._api.complete(body.input, ledger=asked.ledger, resumption=resumption)
        return self._answered(opened, answer, body.stream, asked.headers)

    async def models(self) -> Response:
        """Names the models that are served."""
        models = [model_json(m, name) for m in self._api.listed() for name in m.names]
        return json_response({"object": "list", "data": models})

    async def model(self, model_id: str) -> Response:
        """Describes one model."""
        return json_response(model_json(self._api.model_named(model_id).info, model_id))

    async def version(self) -> Response:
        """Names this software's version."""
        return json_response({"version": metadata.version(DISTRIBUTION)})

    async def healthz(self) -> Response:
        """Answers as long as the process does."""
        return json_response({"status": "ok"})

    async def readyz(self) -> Response:
        """200 where a request for some model can be served now, else 503; and which cannot."""
        ready, reason = self._readiness()
        status = "ready" if ready else "not ready"
        return json_response({"status": status, "reason": reason}, status=200 if ready else 503)

    def _answered(
        self, opened: Opened, answer: MakeAnswer, stream: bool, headers: dict[str, str]
    ) -> Response:
        if stream:
            return StreamedAnswer(opened, answer, headers, keepalive_s=self._keepalive_s)
        return WholeAnswer(opened, answer, headers)


def _created(stream: TextStream) -> int | None:
    """When an answer began that may have been taken up again."""
    return stream.bookmark.created_unix_s if stream.bookmark is not None else None


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("not_found", "there is no such route"),
        405: ("method_not_allowed", "the route does not take this method"),
    }.get(error.status_code, ("http_error", error.detail))
    return error_response(HttpRefusal(error.status_code, code, message, error.headers))


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)
