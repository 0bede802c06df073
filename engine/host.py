"""One worker's engine put together: model, KV cache, block manager, compute thread."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from core.block_hash import BlockHasher, short
from core.config import EngineConfig
from core.errors import ConfigError, InvalidRequest
from core.messages import CacheNews
from core.model_card import ModelCard
from engine.batching import StepBudget
from engine.block_manager import BlockLease, BlockManager
from engine.compute_thread import ComputeThread
from engine.device import Placed, WorkerPlace, choose_device
from engine.engine import Engine, LayerTap, SequenceEvent, no_tap
from engine.grammar import GrammarCompiler
from engine.graphs import CudaCapture, DecodeGraphs
from engine.kv_cache import KvCache, KvSpec, PoolMemory
from engine.llama import LlamaModel
from engine.loader import (
    LoadedModel,
    effective_window,
    kv_spec,
    load_engine_model,
    open_source,
)
from engine.pacing import StepPacer
from engine.parallel.followers import Followers, OnLost
from engine.parallel.messages import Begin
from engine.parallel.others import ALONE
from engine.parallel.shard import Shard, check_ranks
from engine.preflight import pool_bytes
from engine.profiling import peak_bytes
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.triton.digests import TritonDigests
from engine.triton.runtime import TritonUnavailable
from engine.warmup import StepTime, warm_up

_ALONE = WorkerPlace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A lease, and the hashes of the full blocks of its tokens but the last."""

    lease: BlockLease
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """What a worker's desk works with. `close` ends the compute thread and the other ranks."""

    card: ModelCard
    config: EngineConfig
    spec: KvSpec
    kv: KvCache
    blocks: BlockManager
    runner: ModelRunner
    compute: ComputeThread
    window: int  # tokens of prompt and answer together
    hasher: BlockHasher | None  # None: no prefix cache
    step_times: tuple[StepTime, ...]  # of the warm-up
    grammars: GrammarCompiler
    num_kv_heads: int  # the model's; `spec` has those of a rank
    followers: Followers | None = None

    @property
    def whole_block_bytes(self) -> int:
        """Bytes of a block where one rank has all heads: what blocks mean, however many have it."""
        spec = self.spec
        return spec.rank_bytes // spec.num_kv_heads * self.num_kv_heads

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.spec.block_size)

    def lease(
        self, token_ids: tuple[int, ...], num_tokens: int, cache_salt: str, *, reuse: bool = True
    ) -> Leased:
        """Blocks for `num_tokens` tokens, of which `token_ids` are the first.

        Blocks that the prefix cache has are taken from there, except the one with the last of
        `token_ids`: a sequence must compute something to sample from. None is without `reuse`.
        Raises OutOfBlocks.
        """
        hashes: tuple[bytes, ...] = ()
        if self.hasher is not None:
            hashes = self.hasher.chain(token_ids[:-1], cache_salt)
        num_blocks = self.blocks_for(num_tokens)
        lease = self.blocks.acquire(num_blocks, hashes if reuse else ())
        return Leased(lease=lease, hashes=hashes)

    def cache_news(self, *, whole: bool) -> CacheNews:
        """What the prefix cache holds, or what it has gained and lost since it was last told."""
        if whole:
            return CacheNews(whole=True, published=tuple(map(short, self.blocks.published())))
        gained, lost = self.blocks.news()
        return CacheNews(published=tuple(map(short, gained)), evicted=tuple(map(short, lost)))

    def device_digests(self) -> TritonDigests | None:
        """Digests of blocks where a GPU has them; None where it cannot, or has none."""
        if self.kv.device_bytes is None or not TritonDigests.takes(self.spec.block_bytes):
            return None
        try:
            return TritonDigests(self.kv.pool.device)
        except TritonUnavailable as error:
            structlog.get_logger().info("digests_on_the_host", why=str(error))
            return None

    def check_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Raises InvalidRequest where the ids are not this model's: one bad id fails a batch."""
        if not token_ids:
            raise InvalidRequest("the prompt is empty", field="token_ids")
        if len(token_ids) > self.window:
            raise InvalidRequest(
                f"{len(token_ids)} tokens; the window holds {self.window}", field="token_ids"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.card.vocab_size:
            raise InvalidRequest(
                f"a token id outside [0, {self.card.vocab_size})", field="token_ids"
            )

    def engine(
        self,
        *,
        on_step: Callable[[tuple[SequenceEvent, ...]], None],
        on_error: Callable[[tuple[SequenceKey, ...], Exception], None],
        layer_tap: LayerTap = no_tap,
        itl_target_s: float | None = None,
    ) -> Engine:
        """The step loop over this host's parts. `itl_target_s` bounds prompts beside decoding."""
        budget = StepBudget(max_tokens=self.config.max_step_tokens, max_seqs=self.config.max_seqs)
        pacer = StepPacer(target_s=itl_target_s, max_tokens=self.config.max_step_tokens)
        for step in self.step_times:
            pacer.observe(
                num_decodes=step.num_decodes,
                num_prompt_tokens=step.num_prompt_tokens,
                compute_s=step.compute_s,
                num_pairs=step.num_prompt_tokens**2 / 2,
            )
        return Engine(
            runner=self.runner,
            compute=self.compute,
            blocks=self.blocks,
            block_size=self.block_size,
            budget=budget,
            pacer=pacer,
            hasher=self.hasher,
            grammars=self.grammars,
            eos_token_ids=self.card.eos_token_ids,
            on_step=on_step,
            on_error=on_error,
            layer_tap=layer_tap,
        )

    async def close(self) -> None:
        """Ends the compute thread after the step in progress, and the ranks after that."""
        self.grammars.close()
        await self.compute.close()
        if self.followers is not None:
            await asyncio.to_thread(self.followers.close)


async def build_host(
    card: ModelCard,
    config: EngineConfig,
    *,
    kv_bytes: int | None,
    cpu_kv_bytes: int = 2**31,
    threads: int,
    secret: bytes,
    make_memory: Callable[[KvSpec], PoolMemory | None] = lambda spec: None,
    place: WorkerPlace = _ALONE,
    ranks: int = 1,
    ranks_setting: str = "ranks",
    on_rank_lost: OnLost = lambda why: None,
) -> EngineHost:
    """Loads the model on the compute thread while the event loop stays free.

    `kv_bytes` is for the KV pool; None: on a CPU `cpu_kv_bytes`, on a GPU what its memory has left.
    `secret` keys the prefix cache. `make_memory` may give the host memory for the KV pool, of
    `spec.num_blocks * spec.block_bytes`.

    With several `ranks`, a setting of the name `ranks_setting`, the model is shared by this process
    and others that it starts, and so are `threads`. Where one of them is lost, `on_rank_lost` hears
    it, on any thread: no step can be computed any more.

    Raises ConfigError where the model or the pool cannot be had.
    """
    threads = max(1, threads // ranks)
    compute = ComputeThread(threads=threads)
    started: list[Followers] = []

    def load() -> EngineHost:
        placed = choose_device(config.device, place)
        followers: Followers | None = None
        if ranks > 1:
            check_ranks(open_source(Path(card.source)).config(), ranks, ranks_setting)
            _check_on_cpu(placed, ranks, ranks_setting)
            begin = Begin(card=card, config=config, shard=Shard(0, ranks), threads=threads)
            followers = Followers.start(begin, on_rank_lost)
            started.append(followers)
        if placed.gpu is not None:
            torch.cuda.set_device(placed.device)  # of this thread, which is the only one to compute
        group = followers.group if followers is not None else None
        loaded = load_engine_model(card, config, True, placed, group)
        num_bytes = kv_bytes
        if num_bytes is None:
            num_bytes = _gpu_pool_bytes(loaded, config, placed) if placed.gpu else cpu_kv_bytes
        spec = kv_spec(loaded.config, config, num_bytes, ranks)
        memory = make_memory(spec)
        if followers is not None:
            memory = memory or PoolMemory.anonymous(spec.kv_bytes)
            followers.await_loaded()
            followers.give_pool(spec, memory)
        kv = KvCache(spec, memory.buffer if memory is not None else None, placed.device)
        blocks = BlockManager(spec.num_blocks)
        window = effective_window(card, config)
        runner = ModelRunner(loaded.model, kv, others=followers or ALONE)
        if placed.gpu is not None and config.cuda_graphs:
            runner.graphs = _graphs(loaded.model, kv, config, window)
        return EngineHost(
            card=card,
            config=config,
            spec=spec,
            kv=kv,
            blocks=blocks,
            runner=runner,
            compute=compute,
            window=window,
            hasher=BlockHasher(secret, spec.block_size) if config.prefix_cache else None,
            step_times=warm_up(runner, blocks, block_size=spec.block_size, window=window),
            grammars=GrammarCompiler(card, timeout_s=config.grammar_timeout_s),
            num_kv_heads=loaded.config.num_kv_heads,
            followers=followers,
        )

    try:
        return await compute.run(load)
    except BaseException:
        await asyncio.shield(compute.close())
        for followers in started:
            await asyncio.shield(asyncio.to_thread(followers.close))
        raise


def _check_on_cpu(placed: Placed, ranks: int, setting: str) -> None:
    if placed.gpu is not None:
        raise ConfigError(
            f"{setting}: {ranks} ranks compute on CPUs only so far, and this worker is on "
            f"{placed.gpu}: set engine.device = 'cpu', or {setting} = 1"
        )


def _gpu_pool_bytes(loaded: LoadedModel, config: EngineConfig, placed: Placed) -> int:
    """What a GPU has left for the KV pool, by computing the largest step once."""
    assert placed.gpu is not None
    used_bytes = peak_bytes(
        loaded.model,
        kv_spec(loaded.config, config),
        num_tokens=config.max_step_tokens,
        max_seqs=config.max_seqs,
    )
    left_bytes = pool_bytes(
        placed.gpu,
        used_bytes=used_bytes,
        share=config.gpu_memory_share,
        num_workers=placed.sharing,
    )
    structlog.get_logger().info("gpu_memory", used_bytes=used_bytes, kv_bytes=left_bytes)
    return left_bytes


def _graphs(
    model: LlamaModel, kv: KvCache, config: EngineConfig, window: int
) -> DecodeGraphs | None:
    """Captured decode steps; None, and one log line, where the attention cannot be captured."""
    if not model.replayable:
        structlog.get_logger().info("decode_graphs_not_used", why="torch's attention has none")
        return None
    graphs = DecodeGraphs(
        lambda inputs: model.forward_decode(inputs, kv),
        kv,
        max_seqs=config.max_seqs,
        window=window,
        capture=CudaCapture(),
    )
    with torch.inference_mode():
        graphs.capture_all()
    return graphs


def default_threads() -> int:
    """What the launcher set for this process, else every core that it may run on."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
