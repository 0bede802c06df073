"""What the ranks of one model tell each other in a step: sums, and the parts of the logits.

By NCCL between GPUs, by gloo between processes on CPUs. Made directly, without the process's
default group, which other parts of the process may want for themselves.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from core.errors import Unavailable
from engine.parallel.shard import Shard

# For one collective, and for the others to come to the group at first. A rank that died is
# noticed at once, by its closed connection; this is for one that lives and does not answer.
TIMEOUT_S = 60.0
_LOOPBACK = "127.0.0.1"


class RankGroup:
    """All ranks, as one of them (`shard`) sees them. They are on one host.

    Every method is called by all ranks, in the same order and with the same shapes, on the compute
    thread. Each raises Unavailable where another rank is lost.
    """

    def __init__(
        self,
        store: Store,
        shard: Shard,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Blocks until the others are there. Raises Unavailable where they do not come."""
        self.shard = shard
        self._device = device
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        try:
            if device.type == "cuda":
                nccl_options: Any = dist.ProcessGroupNCCL.Options()
                nccl_options._timeout = timeout
                self._group: Any = dist.ProcessGroupNCCL(
                    store, shard.rank, shard.ranks, nccl_options
                )
            else:
                gloo: Any = dist.ProcessGroupGloo  # its options have no public name
                options = gloo._Options()
                options._timeout = timeout
                options._threads = 1
                options._devices = [gloo.create_device(hostname=_LOOPBACK)]
                self._group = gloo(store, shard.rank, shard.ranks, options)
        except (RuntimeError, TimeoutError) as error:
            raise Unavailable(f"the ranks did not find each other: {_line(error)}") from error

    def sum_(self, numbers: Tensor) -> None:
        """Makes `numbers` the sum of all ranks', in place. All ranks get the same bits."""
        if numbers.numel():
            self._wait(self._group.allreduce([numbers]))

    def gather(self, part: Tensor) -> Tensor | None:
        """The parts of all ranks, side by side: [rows, columns] to [rows, ranks * columns].

        On rank 0; the others get None.
        """
        if not part.numel():
            return part.new_empty((len(part), part.shape[1] * self.shard.ranks))
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.shard.rank:
            self._wait(self._group.gather([], [part], options))
            return None
        parts = [torch.empty_like(part) for _ in range(self.shard.ranks)]
        self._wait(self._group.gather([parts], [part], options))
        return torch.cat(parts, dim=1)

    def meet(self) -> None:
        """Returns once all ranks are here."""
        self._wait(self._group.allreduce([torch.zeros(1, device=self._device)]))

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise Unavailable(f"a rank was lost: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
