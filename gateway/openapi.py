"""/openapi.json: the HTTP API as a machine reads it.

Types come from the bodies that parse requests, ranges and defaults from the table that checks
them, and the values that pass of a field which is not served from the table that sifts them.
"""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from fastapi import FastAPI

from core.config import GatewayConfig
from gateway.openai_fields import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_MESSAGE,
    UNSUPPORTED_STREAM_OPTIONS,
    Passes,
)
from gateway.openai_schema import ChatBody, CompletionBody
from gateway.openapi_answers import ANSWERS, Schema
from gateway.ranges import RANGES, Range, with_range
from gateway.strict_body import StrictBody
from gateway.tokenize_schema import UNSUPPORTED_TOKENIZE, DetokenizeBody, TokenizeBody
from gateway.validation import ROLES, Limits

DISTRIBUTION = "tandem-llm"
_REFERENCE = "#/components/schemas/{model}"
_NOT_SERVED = "Not served: only values that ask for nothing pass, any other is refused."
_LABEL = "For the caller's own books: taken, and not used."
_BODIES: dict[type[StrictBody], dict[str, Passes]] = {
    ChatBody: UNSUPPORTED_CHAT,
    CompletionBody: UNSUPPORTED_COMPLETION,
    TokenizeBody: UNSUPPORTED_TOKENIZE,
    DetokenizeBody: {},
}
# What the objects inside of bodies take beside their own fields.
_INNER: dict[str, dict[str, Passes]] = {
    "Message": UNSUPPORTED_MESSAGE,
    "StreamOptions": UNSUPPORTED_STREAM_OPTIONS,
}
_ERRORS = {
    400: "The request can never succeed; `param` names the field.",
    401: "No API key, or one that is not valid.",
    404: "There is no model of that name, or no such route.",
    405: "The route does not take this method.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8, or is compressed.",
    429: "A quota of the key or its tenant is used up.",
    431: "The request's head is too large.",
    500: "A fault of the server.",
    503: "No room, or no worker, now; `Retry-After` says when to come back.",
    504: "The request's time ran out.",
}
_READ = (400, 401, 404, 405, 408, 429, 431, 500)
_WRITTEN = (*_READ, 413, 415, 503, 504)


class DocumentedApp(FastAPI):
    """A FastAPI application that serves this description, since it parses no bodies itself."""

    def __init__(
        self, config: GatewayConfig, limits: Limits, names: Sequence[str], *, several: bool
    ) -> None:
        super().__init__(docs_url=None, redoc_url=None)
        self._document = document(config, limits, names, several=several)

    def openapi(self) -> dict[str, Any]:
        return self._document


def document(
    config: GatewayConfig, limits: Limits, names: Sequence[str] = (), *, several: bool = False
) -> dict[str, Any]:
    """The whole description, for a server and models with these limits at most.

    `names` are all by which a model can be asked; none: the limits' own. Where there are `several`
    models, one must be named.
    """
    schemas = _request_schemas(config, limits)
    for schema in schemas.values():
        if (model := schema["properties"].get("model")) is not None:
            unnamed = [None] if None in model["enum"] and not several else []
            model["enum"] = [*(names or (limits.served_name,)), *unnamed]
    security: list[dict[str, list[str]]] = [{"bearer": []}, {"api-key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": metadata.version(DISTRIBUTION)},
        "paths": _paths(limits.served_name),
        "components": {
            "schemas": schemas | ANSWERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
        "security": security if config.api_keys_file is not None else [*security, {}],
    }


def _paths(served: str) -> dict[str, Any]:
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    ready = _answers("Readiness")
    text = {"model": served, "prompt": "The capital of France is"}
    chat = {"model": served, "messages": [{"role": "user", "content": "Hello!"}]}
    return {
        "/v1/chat/completions": {
            "post": _generates("Answers a conversation.", "ChatBody", "ChatCompletion", chat)
        },
        "/v1/completions": {
            "post": _generates("Continues a text.", "CompletionBody", "Completion", text)
        },
        "/tokenize": {"post": _takes("Tokenises a prompt.", "TokenizeBody", "Tokenized", text)},
        "/detokenize": {
            "post": _takes("The text of tokens.", "DetokenizeBody", "Detokenized", {"tokens": [1]})
        },
        "/v1/models": {"get": _gives("Names the models that are served.", "ModelList")},
        "/v1/models/{model_id}": {
            "get": _gives("Describes one model.", "Model") | {"parameters": [model_id]}
        },
        "/version": {"get": _gives("Names this software's version.", "Version")},
        "/healthz": {"get": _gives("Answers as long as the process does.", "Health") | _OPEN},
        "/readyz": {
            "get": {
                "summary": "Whether a request can be served now.",
                "responses": _responses({"200": ready, "503": ready}, (405, 431, 500)),
            }
            | _OPEN
        },
    }


_OPEN: dict[str, Any] = {"security": [{}]}


def _gives(summary: str, answer: str) -> dict[str, Any]:
    return {"summary": summary, "responses": _responses({"200": _answers(answer)}, _READ)}


def _takes(summary: str, body: str, answer: str, example: Schema) -> dict[str, Any]:
    content = _json(body)
    content["application/json"]["example"] = example
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": _responses({"200": _answers(answer)}, _WRITTEN),
    }


def _generates(summary: str, body: str, answer: str, example: Schema) -> dict[str, Any]:
    found = _takes(summary, body, answer, {**example, "max_tokens": 16})
    streamed = {"text/event-stream": {"schema": {"type": "string"}}}
    found["responses"]["200"]["content"] |= streamed
    found["responses"]["200"]["description"] = (
        f"The answer; with `stream`, each event's data is a {answer}Chunk, and [DONE] is the last. "
        "What fails after the first byte is an event with an Error, and no [DONE] follows."
    )
    return found


def _answers(name: str) -> dict[str, Any]:
    return {"description": name, "content": _json(name)}


def _responses(answers: Mapping[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    return {
        **{
            str(status): {"description": _ERRORS[status], "content": _json("Error")}
            for status in errors
        },
        **answers,
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=name)}}}


def _request_schemas(config: GatewayConfig, limits: Limits) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for body, table in _BODIES.items():
        schema = body.model_json_schema(ref_template=_REFERENCE)
        for name, inner in schema.pop("$defs", {}).items():
            found[name] = _completed(inner, _INNER.get(name, {}), config, limits)
        found[body.__name__] = _completed(schema, table, config, limits)
    found["Message"]["properties"]["role"]["enum"] = list(ROLES)
    found["ChatBody"]["properties"]["messages"]["minItems"] = 1
    return found


def _completed(
    schema: Schema, table: dict[str, Passes], config: GatewayConfig, limits: Limits
) -> Schema:
    """With ranges, with the fields that are not served, and open to unknown ones unless strict."""
    properties = {
        name: _property(name, found, limits) for name, found in schema["properties"].items()
    }
    if "stop" in properties:
        properties["stop"] = _stop(config) | {"description": "The answer ends before any of these."}
    for name, high in _bounds(config, limits).items():
        if name in properties:
            properties[name] = with_range(properties[name], Range(high=high))
    for name, passes in table.items():
        words = _LABEL if passes.kinds else _NOT_SERVED
        properties.setdefault(name, passes.schema | {"description": words})
    return {
        "type": "object",
        **({"description": schema["description"]} if "description" in schema else {}),
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": not config.strict_fields,
    }


def _property(name: str, schema: Schema, limits: Limits) -> Schema:
    found = _loosened({key: value for key, value in schema.items() if key != "title"}, limits)
    if name == "model":
        found = _named(found, limits.served_name)
    if found.get("default", ...) is None:
        del found["default"]  # absent and null mean the same, and rarely nothing
    if name in RANGES:
        found = with_range(found, RANGES[name])
        if RANGES[name].default is not None:
            found["default"] = RANGES[name].default
    return found


def _named(schema: Schema, served: str) -> Schema:
    """The model's name, and null where none need be named."""
    names = [served, *([None] if "anyOf" in schema else [])]
    return {"enum": names} | {k: v for k, v in schema.items() if k not in ("type", "anyOf")}


def _loosened(schema: Schema, limits: Limits) -> Schema:
    """An empty list fits two branches of a union. Integers in lists are token ids."""
    found = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    if found.get("items") == {"type": "integer"}:
        found["items"] = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    if "anyOf" in found:
        found["anyOf"] = [_loosened(branch, limits) for branch in found["anyOf"]]
    return found


def _bounds(config: GatewayConfig, limits: Limits) -> dict[str, int]:
    """The most of what this server sets a bound to."""
    return {
        "n": config.max_choices,
        "best_of": config.max_choices,
        "logprobs": config.max_logprobs,
        "top_logprobs": config.max_logprobs,
        "prompt_logprobs": config.max_logprobs,
        "max_tokens": limits.window - 1,
        "max_completion_tokens": limits.window - 1,
    }


def _stop(config: GatewayConfig) -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": config.max_stop_chars}
    texts = {"type": "array", "items": text, "maxItems": config.max_stop_strings}
    return {"anyOf": [text, texts, {"type": "null"}]}
