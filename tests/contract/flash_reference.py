"""What the flash-attention packages take and give, in torch: a wrong call fails here, on a CPU.

Each class stands for one package as a module; its functions have that package's signatures and
refuse what the kernels would refuse, or silently misread.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def _int32_vector(name: str, x: Tensor, length: int) -> None:
    assert x.dtype == torch.int32, f"{name} is {x.dtype}"
    assert x.shape == (length,), f"{name} is {list(x.shape)}, not [{length}]"
    assert x.is_contiguous(), name


def _cumulative(name: str, x: Tensor, total: int | None = None) -> list[int]:
    _int32_vector(name, x, len(x))
    values: list[int] = x.tolist()
    assert values[0] == 0 and values == sorted(values), f"{name}: {values}"
    assert total is None or values[-1] == total, f"{name} ends at {values[-1]}, not {total}"
    return values


def _paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Sequence[int], multiple: int
) -> None:
    """Checks what both functions share. q is [..., H, D]; k and v [blocks, page, K, D]."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert x.dtype in (torch.float16, torch.bfloat16), f"{name} is {x.dtype}"
        assert x.dtype == q.dtype and x.device == q.device
        assert x.stride(-1) == 1, f"{name}'s last dimension is not contiguous"
    assert k.ndim == 4 and k.shape == v.shape and k.stride() == v.stride()
    assert q.shape[-1] == k.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[2] == 0, "query heads do not share KV heads evenly"
    page = k.shape[1]
    assert page % multiple == 0, f"a page of {page} tokens, not a multiple of {multiple}"
    assert table.dtype == torch.int32 and table.ndim == 2 and table.stride(-1) == 1
    assert len(table) == len(lengths)
    assert max(lengths) <= table.shape[1] * page, "a context longer than its table"
    used = [int(i) for row, n in zip(table, lengths, strict=True) for i in row[: -(-n // page)]]
    assert all(0 <= i < len(k) for i in used), "a block outside the pool"


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, length: int, scale: float) -> Tensor:
    """q [n, H, D] at the end of a context: causal, aligned to its last token."""
    if length == 0:
        return torch.zeros_like(q)
    page = k.shape[1]
    used = blocks[: -(-length // page)].long()
    group = q.shape[1] // k.shape[2]
    keys, values = (
        x[used].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (k, v)
    )
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    seen = torch.ones(len(q), length, dtype=torch.bool).tril(length - len(q))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Sequence[int],
    longest: tuple[int, int],
    table: Tensor,
    multiple: int,
    scale: float,
) -> Tensor:
    assert q.ndim == 3
    ends = _cumulative("cu_seqlens_q", cu_seqlens_q, len(q))
    spans = list(itertools.pairwise(ends))
    assert len(spans) == len(lengths)
    _paged(q, k, v, table, lengths, multiple)
    for name, most, given in (
        ("max_seqlen_q", max(end - begin for begin, end in spans), longest[0]),
        ("max_seqlen_k", max(lengths), longest[1]),
    ):
        assert isinstance(given, int) and given >= most, f"{name} is {given}, and {most} come"
    return torch.cat(
        [
            _attend(q[begin:end], k, v, blocks, length, scale)
            for (begin, end), blocks, length in zip(spans, table, lengths, strict=True)
        ]
    )


class _Kvcache:
    multiple = 16
    calls = 0

    @classmethod
    def flash_attn_with_kvcache(
        cls,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        cache_seqlens=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
    ):
        assert q.ndim == 4 and q.shape[1] == 1, f"q is {list(q.shape)}"
        assert k is None and v is None and causal
        _int32_vector("cache_seqlens", cache_seqlens, len(q))
        lengths = cache_seqlens.tolist()
        _paged(q, k_cache, v_cache, block_table, lengths, cls.multiple)
        cls.calls += 1
        rows = zip(q, block_table, lengths, strict=True)
        mixed = [_attend(x, k_cache, v_cache, ids, n, softmax_scale) for x, ids, n in rows]
        return torch.stack(mixed)


class VllmFlashAttn(_Kvcache):
    """vllm-flash-attn 2.6."""

    @classmethod
    def flash_attn_varlen_func(
        cls,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        block_table=None,
    ):
        assert causal and dropout_p == 0.0
        ends = _cumulative("cu_seqlens_k", cu_seqlens_k)
        lengths = [end - begin for begin, end in itertools.pairwise(ends)]
        longest = (max_seqlen_q, max_seqlen_k)
        return _varlen(
            *(q, k, v, cu_seqlens_q, lengths, longest, block_table, cls.multiple, softmax_scale)
        )


class FlashAttn(VllmFlashAttn):
    """flash-attn 2.8, whose pages are of 256 tokens or a multiple."""

    multiple = 256


class VllmInside:
    """vllm.vllm_flash_attn of vLLM 0.32: no function for decodes, and contexts as lengths."""

    multiple = 16

    @staticmethod
    def is_fa_version_supported(fa_version):
        return fa_version == 3

    @classmethod
    def flash_attn_varlen_func(
        cls,
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        block_table=None,
        fa_version=2,
    ):
        assert causal and fa_version == 3
        assert cu_seqlens_k is None and seqused_k is not None, "paged keys take seqused_k"
        _int32_vector("seqused_k", seqused_k, len(cu_seqlens_q) - 1)
        longest = (max_seqlen_q, max_seqlen_k)
        lengths = seqused_k.tolist()
        return _varlen(
            *(q, k, v, cu_seqlens_q, lengths, longest, block_table, cls.multiple, softmax_scale)
        )
