"""When a transfer's blocks leave: behind each step, or layer by layer beside the last one."""

import asyncio
from collections.abc import Callable, Mapping

from core.config import TransferConfig
from core.messages import TransferId
from engine.kv_cache import KvSpec
from engine.step_batch import StepBatch
from kv_transfer.states import SenderState
from prefill_worker.peer import Peer
from prefill_worker.push import Push
from prefill_worker.sending import Sending


class Pusher:
    """Cuts transfers into pushes, and learns from each step what pushing beside it costs."""

    def __init__(
        self,
        spec: KvSpec,
        config: TransferConfig,
        sendings: Mapping[TransferId, Sending],
    ) -> None:
        self._spec = spec
        self._config = config
        self._sendings = sendings
        self._step_s_per_token = 0.0  # of steps beside which nothing was pushed by layer
        self._step_tokens = 0
        self._tapped: list[tuple[Peer, Push]] = []

    def tap(self, batch: StepBatch) -> Callable[[int], None] | None:
        """Before a step: which last chunks leave layer by layer while it computes them.

        Only the last chunk's blocks are exposed; those of earlier chunks leave beside the next.
        """
        self._step_tokens = sum(len(item.token_ids) for item in batch.items)
        self._tapped = []
        for item in batch.items:
            sending = self._sendings.get(item.key.transfer) if item.sample is not None else None
            if sending is not None and self._goes_by_layer(sending):
                span = slice(sending.num_queued, len(sending.order.block_ids))
                sending.layers = self._push(sending, span)
                sending.layers.by_layer = True
                sending.num_queued = span.stop
                self._tapped.append((sending.peer, sending.layers))
        if not self._tapped:
            return None
        tapped = tuple(self._tapped)

        def on_layer(layer: int) -> None:
            for peer, push in tapped:
                peer.push_layer(push, layer)

        return on_layer

    def learn(self, compute_s: float) -> None:
        """After it, from its time: what a token costs, or what pushing beside it costs."""
        expected_s = self._step_tokens * self._step_s_per_token
        for peer, _ in self._tapped:
            peer.cost.observe_step(expected_s=expected_s, actual_s=compute_s)
        if not self._tapped:
            per_token_s = compute_s / max(1, self._step_tokens)
            before_s = self._step_s_per_token or per_token_s
            self._step_s_per_token = 0.8 * before_s + 0.2 * per_token_s

    def begin(self, sending: Sending) -> asyncio.Future[tuple[int, ...]] | None:
        """Sends the blocks computed since the last time; None where there is nothing to send.

        Gives the digests once all of them are written. The last time there is always something:
        the end of the push by layer, or a push that may be empty, behind all earlier ones.
        """
        if not sending.kv_is_wanted:  # nobody will decode: what is not on its way stays here
            for begun in sending.pushes:
                begun.drop()
        first, end = sending.num_queued, sending.num_computed_blocks
        if sending.layers is not None:
            push = sending.layers
        elif end > first or sending.first_token_id is not None:
            push = self._push(sending, slice(first, end if sending.kv_is_wanted else first))
            sending.num_queued = end
        else:
            return None
        return sending.peer.finish(push)

    def _goes_by_layer(self, sending: Sending) -> bool:
        if sending.state not in (SenderState.ACCEPTED, SenderState.SENDING):
            return False
        if self._config.push != "auto":
            return self._config.push == "layers"
        return sending.peer.cost.layerwise_pays(
            num_blocks=len(sending.order.block_ids) - sending.num_queued,
            num_layers=self._spec.num_layers,
            block_bytes=sending.peer.layout.block_bytes,
            compute_s=self._step_tokens * self._step_s_per_token,
        )

    def _push(self, sending: Sending, span: slice) -> Push:
        push = Push(
            sending.transfer,
            sending.peer.blocks,
            span.start,
            sending.sources[span],
            sending.order.block_ids[span],
            sending.peer.layout,
        )
        sending.pushes.append(push)
        return push
