"""The kernel that makes heads ready and writes them to the pool, as both paged backends call it."""

from torch import Tensor

from engine.attention import QkNorm, Rotation
from engine.kv_cache import KvCache
from engine.triton import runtime
from engine.triton.rope_write import rope_write

_HEADS = 16  # heads that one program turns and writes


def turn_and_write(
    kv: KvCache,
    layer: int,
    qkv: Tensor,
    slots: Tensor,
    rotation: Rotation,
    qk_norm: QkNorm | None,
) -> None:
    """Norms and turns; queries stay in `qkv` [tokens, (H + 2 K) * D], the rest goes to `slots`."""
    spec = kv.spec
    kv_heads, dim = spec.num_kv_heads, spec.head_dim
    tokens, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    pool = kv.pool[:, layer]
    num_rows = tokens * (heads + 2 * kv_heads)
    per_program = runtime.per_program(num_rows, _HEADS)
    rope_write[(-(-num_rows // per_program),)](
        *(qkv, pool, slots, rotation.cos, rotation.sin),
        qkv if qk_norm is None else qk_norm.query,
        qkv if qk_norm is None else qk_norm.key,
        0.0 if qk_norm is None else qk_norm.eps,
        *(pool.stride(0), pool.stride(1), num_rows),
        *(heads, kv_heads, dim, spec.block_size, spec.head_width, spec.fp8),
        *(per_program, runtime.tile(dim // 2)),
        NORMED=qk_norm is not None,
        BY_BITS=runtime.interpreted(),
    )
