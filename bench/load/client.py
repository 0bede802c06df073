"""Sends load requests to one server, and keeps the record of each."""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any

import httpx

from bench.load.answer import Answer, complaint
from bench.load.http_stream import Address, exchange
from bench.load.request import Failure, LoadRequest, Record
from bench.load.sse import SseReader
from core.errors import InvalidRequest, Unavailable

_MODELS_TIMEOUT_S = 10.0
_MAX_COMPLAINT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model on a server. `window` is its longest prompt and answer, None where nobody says."""

    address: Address
    model: str
    window: int | None
    api_key: str | None = None


def find_target(url: str, *, model: str | None = None, api_key: str | None = None) -> Target:
    """Asks the server what it serves: the named model, or its first.

    Raises InvalidRequest for what is no URL or no model there, Unavailable where nobody answers.
    """
    address = Address.parse(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(
            f"{address.url}/v1/models", headers=headers, timeout=_MODELS_TIMEOUT_S, trust_env=False
        )
        response.raise_for_status()
        served = {each["id"]: each for each in response.json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = str(error) or type(error).__name__
        raise Unavailable(f"no server at {address.url}: {said.splitlines()[0]}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{address.url} does not answer like a server of this API") from error
    if not served or (model is not None and model not in served):
        names = ", ".join(served) or "none"
        raise InvalidRequest(f"{address.url} has no model {model or ''}: {names}", field="model")
    name = model or next(iter(served))
    window = served[name].get("context_window") or served[name].get("max_model_len")
    return Target(
        address=address,
        model=name,
        window=window if isinstance(window, int) else None,
        api_key=api_key,
    )


class LoadClient:
    """One server under load. `begin_s` is the instant that records count from."""

    def __init__(self, target: Target, *, ignore_eos: bool, timeout_s: float) -> None:
        self.begin_s = time.perf_counter()
        self._target = target
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if target.address.secure else None

    def encode(self, request: LoadRequest) -> bytes:
        """All that goes over the wire, made ahead so that it costs nothing under load."""
        body = json.dumps(
            request.body(self._target.model, ignore_eos=self._ignore_eos), separators=(",", ":")
        )
        return self._target.address.post(request.path, body.encode(), self._target.api_key)

    async def send(self, encoded: bytes, intended_s: float, max_tokens: int) -> Record:
        """The record of one request; whatever goes wrong is in it."""
        answer = _Reading(self.begin_s)
        sent_s = time.perf_counter() - self.begin_s
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await exchange(self._target.address, encoded, answer.take, self._tls)
            answer.close(status)
        except TimeoutError:
            answer.failure = Failure(kind="timeout", detail=f"not done in {self._timeout_s:g} s")
        except ConnectionRefusedError as error:
            answer.failure = Failure(kind="connection_refused", detail=str(error))
        except (OSError, Unavailable) as error:
            answer.failure = Failure(kind="connection_lost", detail=str(error))
        account = answer.account
        return Record(
            intended_s=intended_s,
            sent_s=sent_s,
            token_times_s=tuple(account.token_times_s),
            finished_s=time.perf_counter() - self.begin_s,
            max_tokens=max_tokens,
            completion_tokens=account.completion_tokens,
            prompt_tokens=account.prompt_tokens,
            cached_tokens=account.cached_tokens,
            failure=answer.failure,
        )


class _Reading:
    """One response's body, be it a stream or a refusal."""

    def __init__(self, begin_s: float) -> None:
        self.account = Answer()
        self.failure: Failure | None = None
        self._begin_s = begin_s
        self._events = SseReader()
        self._refusal = b""

    def take(self, status: int, piece: bytes, arrived_s: float) -> None:
        if status != httpx.codes.OK:
            self._refusal = (self._refusal + piece)[:_MAX_COMPLAINT_BYTES]
            return
        for data in self._events.feed(piece):
            self.account.take(data, arrived_s - self._begin_s)

    def close(self, status: int) -> None:
        """The response is whole."""
        if status != httpx.codes.OK:
            said = complaint(_json(self._refusal), f"the server answered {status}")
            self.failure = Failure(kind=f"http_{status}", detail=said)
            return
        self.account.close()
        self.failure = self.account.failure


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
