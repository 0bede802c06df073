"""/tokenize and /detokenize: what a prompt is to the model, without asking it for an answer."""

from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from core.errors import TandemError
from gateway.api import InferenceApi
from gateway.http_errors import error_response, json_response
from gateway.http_request import read_request
from gateway.tokenize_schema import DetokenizeRequest, TokenizeRequest


class TokenRoutes:
    """The two routes over one `InferenceApi`."""

    def __init__(self, api: InferenceApi) -> None:
        self._api = api
        served, strict = api.models.only or "", api.config.strict_fields
        self._read_tokenize = partial(TokenizeRequest.read, served=served, strict=strict)
        self._read_detokenize = partial(DetokenizeRequest.read, served=served, strict=strict)

    async def tokenize(self, request: Request) -> Response:
        """Gives the token ids of a text or a conversation."""
        asked = await read_request(request, self._api.config, self._read_tokenize)
        if isinstance(asked, Response):
            return asked
        body = asked.body
        try:
            ids = await self._api.tokenize(body.input, prefix=body.add_special_tokens)
        except TandemError as error:
            return error_response(error, asked.headers)
        model = self._api.model_named(body.input.model)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.info.context_window,
            "tokens": list(ids),
        }
        if body.return_token_strs:
            answer["token_strs"] = model.token_names(ids)
        return json_response(answer, headers=asked.headers)

    async def detokenize(self, request: Request) -> Response:
        """Gives the text of token ids."""
        asked = await read_request(request, self._api.config, self._read_detokenize)
        if isinstance(asked, Response):
            return asked
        try:
            text = await self._api.detokenize(
                asked.body.model, asked.body.token_ids, field="tokens"
            )
        except TandemError as error:
            return error_response(error, asked.headers)
        return json_response({"prompt": text}, headers=asked.headers)
