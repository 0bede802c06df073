"""Whether what runs on a GPU computes what it should."""

import torch
import xxhash
from torch import Tensor

from bench.gpu.parts import BLOCK_SIZE, pool, random_model, step
from bench.gpu.place import SMALL, Place
from engine.attention import AttentionBackend, AttentionRow, Rotation
from engine.flash.package import FlashUnavailable, find_package
from engine.fp8 import Fp8Linear
from engine.fp8_numbers import quantise
from engine.graphs import DecodeGraphs
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.runner import ModelRunner
from engine.step_batch import SampledToken
from engine.torch_attention import TorchAttention
from engine.triton.digests import TritonDigests
from engine.triton.kernels import TritonKernels

_GREEDY_TOKENS = 16
# Heads, KV heads, dims; a dry run computes the first.
_SHAPES = ((6, 2, 64), (32, 8, 128), (8, 1, 128), (4, 4, 80), (10, 2, 96))
# Of bfloat16 results of the order of one: the last bit, and sums in another order.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Wrong(Exception):
    """What differs, and by how much."""


def attention(place: Place) -> dict[str, object]:
    """Every backend against torch's, over chunks and single tokens. Raises Wrong."""
    worst: dict[str, float] = {}
    for heads, kv_heads, dim in _SHAPES[:1] if place.dry else _SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for name, backend in _backends(place, dtype, dim).items():
                error = _attention_error(place, backend, dtype, (heads, kv_heads, dim))
                worst[name] = max(worst.get(name, 0.0), error / _TOLERANCE[dtype])
                if error > _TOLERANCE[dtype]:
                    raise Wrong(f"{name}, {heads}/{kv_heads}x{dim}, {dtype}: off by {error:.2g}")
    return {"backends": sorted(worst)}


def _backends(place: Place, dtype: torch.dtype, dim: int) -> dict[str, AttentionBackend]:
    found: dict[str, AttentionBackend] = {"triton": TritonKernels(place.device).attention}
    try:
        package = find_package(place.device)
        package.check(dtype=dtype, head_dim=dim, block_size=BLOCK_SIZE)
    except FlashUnavailable:
        return found
    from engine.flash.attention import FlashAttention

    return {**found, "flash": FlashAttention(package)}


def _attention_error(
    place: Place, backend: AttentionBackend, dtype: torch.dtype, shape: tuple[int, int, int]
) -> float:
    """The largest difference from torch's attention of the same numbers, over some steps."""
    heads, kv_heads, dim = shape
    lengths = (40, 17) if place.dry else (3000, 700, 64, 1)
    per_row = -(-max(lengths) // BLOCK_SIZE)
    spec = KvSpec(
        num_blocks=per_row * len(lengths),
        num_layers=1,
        block_size=BLOCK_SIZE,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
    )
    ours, torchs = KvCache(spec, device=place.device), KvCache(spec, device=place.device)
    generator = torch.Generator(place.device).manual_seed(7)
    error = 0.0
    cuts = [[0, length // 2, max(length - 1, length // 2), length] for length in lengths]
    for turn in range(3):
        rows = [
            AttentionRow(
                start=cut[turn],
                num_tokens=cut[turn + 1] - cut[turn],
                block_ids=tuple(range(i * per_row, (i + 1) * per_row)),
            )
            for i, cut in enumerate(cuts)
            if cut[turn + 1] > cut[turn]
        ]
        tokens = sum(row.num_tokens for row in rows)
        width = (heads + 2 * kv_heads) * dim
        qkv = torch.randn((tokens, width), generator=generator, device=place.device).to(dtype)
        angles = torch.rand((tokens, dim // 2), generator=generator, device=place.device) * 6
        rotation = Rotation(cos=angles.cos(), sin=angles.sin())
        expected = TorchAttention().begin(torchs, rows, rotation)(0, qkv.clone())
        actual = backend.begin(ours, rows, rotation)(0, qkv.clone())
        error = max(error, float((actual.float() - expected.float()).abs().max()))
    return error


def rows(place: Place) -> dict[str, object]:
    """RMSNorm and SwiGLU against torch's. Raises Wrong."""
    theirs = choose_kernels("torch", torch.bfloat16, 64, device=place.device)
    ours = choose_kernels("triton", torch.bfloat16, 64, device=place.device)
    hidden, delta = (_randn(place, 33, 4096 if not place.dry else 96) for _ in range(2))
    weight = _randn(place, hidden.shape[1])
    _near("norm", *(k.norm(hidden.clone(), weight, 1e-5, delta) for k in (ours, theirs)))
    _near("swiglu", *(k.swiglu(hidden) for k in (ours, theirs)))
    return {}


def _randn(place: Place, *shape: int) -> Tensor:
    return torch.randn(shape, device=place.device).bfloat16()


def _near(what: str, actual: Tensor, expected: Tensor) -> None:
    error = ((actual - expected).float().abs() / (1 + expected.float().abs())).max()
    if float(error) > _TOLERANCE[torch.bfloat16]:
        raise Wrong(f"{what}: off by {float(error):.2g}")


def digests(place: Place) -> dict[str, object]:
    """Digests by the kernel are the library's, to the last bit. Raises Wrong."""
    blocks = torch.randint(
        0, 256, (3, 4096 + 200 if place.dry else 2**21), dtype=torch.uint8, device=place.device
    )
    seeds = (1, 2**40, 2**64 - 1)
    actual = TritonDigests(place.device)(blocks, seeds)
    host = blocks.cpu().numpy()
    expected = tuple(
        xxhash.xxh3_64_intdigest(row.tobytes(), seed=seed)
        for row, seed in zip(host, seeds, strict=True)
    )
    if actual != expected:
        raise Wrong("the digests are not the library's")
    return {}


def fp8(place: Place) -> dict[str, object]:
    """Products in FP8 are those that are defined. Raises Wrong."""
    if not place.dry and torch.cuda.get_device_capability(place.device) < (8, 9):
        return {"skipped": "compute capability below 8.9"}
    rows, weight = _randn(place, 33, 256), _randn(place, 64, 256)
    (x, x_scales), (w, w_scales) = quantise(rows), quantise(weight)
    expected = (x.float() @ w.float().T) * x_scales * w_scales.T
    actual = Fp8Linear(weight, None, place.device)(rows)
    _near("fp8", actual.float(), expected)
    return {}


def graphs(place: Place) -> dict[str, object]:
    """Greedy tokens of replayed decode steps are those of eager ones. Raises Wrong."""
    kernels = choose_kernels("triton", torch.float32, SMALL.head_dim, device=place.device)
    model = random_model(SMALL, torch.float32, place.device, kernels)
    per_row = 4
    texts = []
    sizes: tuple[int, ...] = ()
    for replayed in (False, True):
        runner = ModelRunner(model, pool(SMALL, torch.float32, place.device, 3 * per_row))
        if replayed:
            runner.graphs = _graphs(place, runner, model)
            sizes = runner.graphs.sizes
        texts.append(_greedy(runner, per_row, 3 if place.dry else _GREEDY_TOKENS))
    if texts[0] != texts[1]:
        raise Wrong("replayed steps give other tokens than eager ones")
    if not sizes:
        raise Wrong("no graph was captured")
    return {"batch_sizes": sizes}


def _graphs(place: Place, runner: ModelRunner, model: LlamaModel) -> DecodeGraphs:
    kv = runner.kv
    made = DecodeGraphs(
        lambda inputs: model.forward_decode(inputs, kv),
        kv,
        max_seqs=4,
        window=64,
        capture=place.capture(),
    )
    with torch.inference_mode():
        made.capture_all()
    return made


def _greedy(runner: ModelRunner, per_row: int, num_tokens: int) -> list[list[int]]:
    texts = [[5, 6, 7], [40, 3, 9, 11, 2], [1]]
    parts = [(row, 0, list(text)) for row, text in enumerate(texts)]
    for _ in range(num_tokens):
        for sampled in runner.execute(step(*parts, per_row=per_row)):
            assert isinstance(sampled, SampledToken)
            texts[int(sampled.key.transfer.request_id)].append(sampled.token_id)
        parts = [(row, len(text) - 1, text[-1:]) for row, text in enumerate(texts)]
    return texts
