"""The HTTP API as `tandem chat` uses it: one streamed chat completion after another."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import httpx

from core.errors import InvalidRequest, TandemError, Unavailable

# Connecting to a server that is there takes no time; an answer may queue for long.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_DATA = "data:"


class Client:
    """A connection to a server. Its methods raise TandemError with one line for a person."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            # Proxies of the environment are not asked: the server is at the given address.
            self._http = httpx.Client(
                base_url=self._url,
                headers=headers,
                timeout=_TIMEOUT,
                transport=transport,
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest(f"{url} is not a URL: {error}", field="--url") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of a model that the server serves."""
        try:
            response = self._http.get("/v1/models")
            if response.status_code == httpx.codes.UNAUTHORIZED:
                raise TandemError(_complaint(response))
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self._url} does not answer like a server of this API") from error

    def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, object]
    ) -> Generator[str, None, None]:
        """The answer's text, piece by piece. Closing the iterator cancels the request."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise TandemError(_complaint(response))
                yield from _deltas(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Unavailable:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return Unavailable(f"no server at {self._url}: start one with `tandem serve`")
        return Unavailable(f"{self._url} failed: {error or type(error).__name__}")


def _deltas(lines: Iterator[str]) -> Iterator[str]:
    """The text of server-sent events. Raises where the stream ends before its `[DONE]`."""
    for line in lines:
        if not line.startswith(_DATA):  # a comment, or the blank line between events
            continue
        data = line.removeprefix(_DATA).strip()
        if data == "[DONE]":
            return
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise Unavailable("the server sent an event that is not JSON") from error
        if "error" in event:
            raise TandemError(str(event["error"].get("message", "the request failed")))
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise Unavailable("the server broke off its answer")


def _complaint(response: httpx.Response) -> str:
    """What the server says is wrong, from OpenAI's error shape."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"
