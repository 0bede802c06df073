"""Workers and requests that exist for the scheduler only."""

import random

from core.messages import (
    BlockCounts,
    CacheNews,
    Compatibility,
    Endpoint,
    Enqueue,
    StepCost,
    TransferId,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)

BLOCK_SIZE = 16
MODEL = "m"
_SAME = Compatibility(
    model=MODEL,
    revision="1",
    dtype="bfloat16",
    block_size=BLOCK_SIZE,
    block_bytes=2**21,
    layout="block-major",
    protocol=1,
)
_PROMPT_TOKENS = (64, 512, 2048)
_ANSWER_TOKENS = 256
_NUM_PREFIXES = 32
_PREFIX_BLOCKS = 32
_NUM_TENANTS = 8


def hello(role: WorkerRole, number: int, *, num_blocks: int, max_seqs: int) -> WorkerHello:
    """A worker as large as a GPU's."""
    name = f"{role.name.lower()}-{number}"
    return WorkerHello(
        endpoint=Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}"),
        role=role,
        compatibility=_SAME,
        num_blocks=num_blocks,
        max_seqs=max_seqs,
        max_step_tokens=2048,
        local_prefill=role is WorkerRole.DECODE,
    )


def load(num_blocks: int) -> WorkerLoad:
    """An idle worker that has measured what it does."""
    return WorkerLoad(
        blocks=BlockCounts(free=num_blocks),
        num_running=0,
        num_waiting=0,
        prefill_tokens_per_s=40_000.0,
        step_s=0.008,
        cost=StepCost(base_s=0.005, decode_s=1e-5, token_s=2e-5, pair_s=2e-10),
    )


def prefix(number: int) -> tuple[int, ...]:
    """The hashes of a prompt's beginning that many requests share."""
    return tuple(random.Random(number).getrandbits(64) for _ in range(_PREFIX_BLOCKS))


def cached(worker: int) -> CacheNews:
    """A cache that holds some of the shared beginnings."""
    held = [prefix(n) for n in range(_NUM_PREFIXES) if (n + worker) % 4 == 0]
    return CacheNews(whole=True, published=tuple(each for chain in held for each in chain))


def enqueue(number: int) -> Enqueue:
    """A request of one of some tenants, which begins as some others do."""
    prompt = _PROMPT_TOKENS[number % len(_PROMPT_TOKENS)]
    chain = prefix(number % _NUM_PREFIXES) if prompt > 64 else ()
    return Enqueue(
        transfer=TransferId(request_id=f"request-{number}", attempt=1),
        model=MODEL,
        prompt_tokens=prompt,
        max_new_tokens=_ANSWER_TOKENS,
        remaining_s=600.0,
        tenant=f"tenant-{number % _NUM_TENANTS}",
        block_hashes=chain,
    )
