"""Requests over gRPC, each on a thread of its own, whose tokens can be watched as they come."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from protos.tandem.v1 import inference_pb2, inference_pb2_grpc

# A request's, where none is chosen. Far away: a scheduler refuses at once what a busy machine
# would, by its own measurements, not end in time.
DEADLINE_S = 600.0


class TokenStream:
    """One Generate call: what has come, and how it ended.

    `code` is None while it runs. `num_terminals` counts what told of an end: a `Finished`, or a
    status that is an error. It is 1 in the end, and anything else is a fault of the server.
    """

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        # When each message with tokens came, by the monotonic clock.
        self.arrived_s: list[float] = []
        self.text = ""
        self.finished: inference_pb2.Finished | None = None
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.num_terminals = 0
        self._call: Any = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._ended: Future[None] | None = None

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK

    @property
    def reason(self) -> str:
        """The stop reason in small letters, or the status that is an error."""
        if self.finished is not None:
            name = inference_pb2.StopReason.Name(self.finished.stop_reason)
            return name.removeprefix("STOP_REASON_").lower()
        return self.code.name.lower() if self.code is not None else "running"

    def cancel(self) -> None:
        """The client leaves."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def wait(self, timeout_s: float) -> Self:
        """Returns once it has ended. Raises TimeoutError where it does not, and what went wrong
        on this side."""
        assert self._ended is not None
        self._ended.result(timeout_s)
        return self

    def _run(self, open_call: Callable[[], Any]) -> None:
        with self._lock:
            if self._cancelled:
                self.code = grpc.StatusCode.CANCELLED
                return
            call = self._call = open_call()
        try:
            for response in call:
                if response.delta.token_ids:
                    self.arrived_s.append(time.monotonic())
                self.token_ids += response.delta.token_ids
                self.text += response.delta.text
                if response.HasField("finished"):
                    self.finished = response.finished
                    self.num_terminals += 1
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            self.num_terminals += 1
            self.details = error.details() or ""
            self.code = error.code()
        else:
            self.code = call.code()


class StreamClient:
    """A client of one gateway, with so many requests at once; others wait for an earlier one's end.

    Leaving the block cancels what still runs.
    """

    def __init__(self, target: str, *, at_once: int = 128) -> None:
        # Connections of its own: a shared one may still wait before it tries a restarted gateway.
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="stream")
        self._streams: list[TokenStream] = []

    def start(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float = DEADLINE_S,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> TokenStream:
        """Sends the request as soon as there is room. Its deadline counts from then."""
        stream = TokenStream(request)
        self._streams.append(stream)

        def open_call() -> Any:
            return self._stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata))

        stream._ended = self._threads.submit(stream._run, open_call)
        return stream

    def answer_all(
        self, requests: Sequence[inference_pb2.GenerateRequest], *, timeout_s: float = DEADLINE_S
    ) -> list[TokenStream]:
        """Sends all of them and waits for their ends."""
        streams = [self.start(request, timeout_s=timeout_s) for request in requests]
        return [stream.wait(len(requests) * timeout_s) for stream in streams]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            stream.cancel()
        self._threads.shutdown(wait=True)
        self._channel.close()


def generate(
    model: str, token_ids: Sequence[int], **sampling: object
) -> inference_pb2.GenerateRequest:
    """A request for a continuation of these tokens; greedy unless told otherwise."""
    options: dict[str, Any] = {"temperature": 0.0, **sampling}
    return inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.SamplingOptions(**options),
    )
