"""Matrix products by torch: as they are, or by oneDNN with packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import Linear


class TorchLinear:
    """F.linear over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return F.linear(rows, self._weight, self._bias).to(dtype or rows.dtype)

    def gather(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


class OneDnnLinear:
    """A bfloat16 weight in the layout that oneDNN prefers: packed once instead of at each call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        release(weight)

    def __call__(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return out.to(dtype or rows.dtype)

    def gather(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("a packed weight has no rows to look up")


def torch_linear(weight: Tensor, bias: Tensor | None, *, lookup: bool) -> Linear:
    """The faster of the two that can do it here."""
    on_cpu = weight.device.type == "cpu"
    if on_cpu and weight.dtype == torch.bfloat16 and not lookup and _packs():
        return OneDnnLinear(weight, bias)
    return TorchLinear(weight, bias)


def release(weight: Tensor) -> None:
    """Frees the memory under a weight that lives on in another form. It cannot be read again."""
    storage = weight.untyped_storage()
    if storage.resizable():  # else it is somebody else's memory
        storage.resize_(0)


def _packs() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
