"""What models ask of GPUs at the least: `python -m bench.floors docs/roofline.md` renews the page.

Nothing can be faster than reading what must be read and multiplying what must be multiplied, as
Williams, Waterman and Patterson have it (Roofline, CACM 2009). No number here is a measurement.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A data sheet. FLOP/s are dense, NVLink's bytes in one direction."""

    name: str
    flops: float  # bfloat16
    flops_fp8: float
    memory_bytes_per_s: float
    memory_bytes: float
    nvlink_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with an output projection of its own."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool = False

    @property
    def body_parameters(self) -> int:
        """What each token is multiplied with: the matrices of all layers."""
        heads = self.num_heads * self.head_dim
        qkv = (heads + 2 * self.num_kv_heads * self.head_dim) * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (qkv + heads * self.hidden_size + mlp)

    @property
    def head_parameters(self) -> int:
        """The output projection; the embedding table has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        layer = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model in one precision on groups of `tp` GPUs. KV is in bfloat16."""

    shape: Shape
    gpu: Gpu
    fp8: bool = False
    tp: int = 1

    @property
    def weight_bytes(self) -> float:
        """On each GPU. In FP8 the layers' matrices alone are: tables and norms stay in 16 bits."""
        shape = self.shape
        body = shape.body_parameters * (1 if self.fp8 else 2)
        return (body + 2 * (2 * shape.head_parameters + shape.norm_parameters)) / self.tp

    @property
    def kv_token_bytes(self) -> float:
        """Of one token, on each GPU."""
        shape = self.shape
        return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim / self.tp

    def kv_tokens(self, *, share: float = 0.9, reserved_bytes: float = 3.5e9) -> int:
        """Tokens whose KV fits beside weights and `reserved_bytes` of activations and runtime."""
        left = self.gpu.memory_bytes * share - reserved_bytes - self.weight_bytes
        return max(0, int(left // self.kv_token_bytes))

    def prefill_s(self, tokens: int) -> float:
        """The least that reading a prompt takes: its products, or the weights once."""
        shape = self.shape
        flops = 2.0 * shape.body_parameters * tokens + 2.0 * shape.head_parameters
        pairs = 2.0 * shape.num_layers * shape.num_heads * shape.head_dim * tokens**2
        peak = self.gpu.flops_fp8 if self.fp8 else self.gpu.flops
        compute_s = flops / peak + pairs / self.gpu.flops  # attention is in bfloat16
        return max(compute_s / self.tp, self._read_bytes / self.gpu.memory_bytes_per_s)

    def decode_s(self, batch: int, context: int) -> float:
        """The least that one step takes: its weights once, and every context's KV."""
        num_bytes = self._read_bytes + batch * context * self.kv_token_bytes
        peak = self.gpu.flops_fp8 if self.fp8 else self.gpu.flops
        flops = 2.0 * batch * (self.shape.body_parameters + self.shape.head_parameters)
        return max(num_bytes / self.gpu.memory_bytes_per_s, flops / peak / self.tp)

    def handoff_s(self, tokens: int) -> float:
        """The least that moving a prompt's KV to the next GPU takes; ranks move theirs at once."""
        return tokens * self.kv_token_bytes / self.gpu.nvlink_bytes_per_s

    @property
    def _read_bytes(self) -> float:
        """Weights that a step reads: all but the embedding table, of which it reads rows."""
        return self.weight_bytes - 2 * self.shape.head_parameters / self.tp


H100 = Gpu(
    name="H100 SXM",
    flops=989e12,
    flops_fp8=1979e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80e9,
    nvlink_bytes_per_s=450e9,
)
LLAMA_8B = Shape(
    name="Llama-3.1-8B",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
LLAMA_70B = Shape(
    name="Llama-3.1-70B",
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
QWEN3_32B = Shape(
    name="Qwen3-32B",
    num_layers=64,
    hidden_size=5120,
    intermediate_size=25600,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    qk_norm=True,
)
SERVED = {
    "Llama-3.1-8B": Served(shape=LLAMA_8B, gpu=H100),
    "Llama-3.1-8B, FP8": Served(shape=LLAMA_8B, gpu=H100, fp8=True),
    "Qwen3-32B, FP8": Served(shape=QWEN3_32B, gpu=H100, fp8=True),
    "Qwen3-32B, TP2": Served(shape=QWEN3_32B, gpu=H100, tp=2),
    "Llama-3.1-70B, FP8, TP2": Served(shape=LLAMA_70B, gpu=H100, fp8=True, tp=2),
}
_MARKS = re.compile(r"(<!-- floors -->\n).*?(<!-- end -->)", re.S)


def table() -> str:
    """Every served model's budget and floors, as Markdown."""
    lines = [
        "| Model | Weights a GPU | KV of a token | Tokens with KV | Prompt of 1k | of 8k "
        "| Step of 32, context 1k | Hand-off of 1k |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, served in SERVED.items():
        lines.append(
            f"| {name} | {served.weight_bytes / 1e9:.1f} GB "
            f"| {served.kv_token_bytes / 1024:.0f} KiB | {served.kv_tokens():,} "
            f"| {1e3 * served.prefill_s(1024):.1f} ms | {1e3 * served.prefill_s(8192):.0f} ms "
            f"| {1e3 * served.decode_s(32, 1024):.1f} ms | {1e3 * served.handoff_s(1024):.2f} ms |"
        )
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """The page with the table between its marks."""
    return _MARKS.sub(lambda found: found[1] + table() + found[2], page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
