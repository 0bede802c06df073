"""What the first rank tells the others. Pickled: both ends are one program, started by itself."""

from dataclasses import dataclass, replace

from core.config import EngineConfig
from core.messages import SamplingParams, TransferId
from core.model_card import ModelCard
from engine.kv_cache import KvSpec
from engine.parallel.shard import Shard
from engine.sequence import SequenceKey
from engine.step_batch import SampleRequest, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """To load one's part of a model."""

    card: ModelCard
    config: EngineConfig
    shard: Shard
    threads: int
    store: str = ""  # the file where the ranks find each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The worker's KV pool, of which each rank takes its part. The file itself follows."""

    spec: KvSpec
    offset: int  # bytes of the file before the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was asked for last is done; or why not, where it cannot be on this configuration."""

    refused: str | None = None


_NOBODY = SequenceKey(TransferId(request_id="", attempt=0))
_SOME = SampleRequest(params=SamplingParams(), position=0)


def for_others(batch: StepBatch) -> StepBatch:
    """The batch without what only the sampler reads."""
    items = (
        replace(item, key=_NOBODY, sample=None if item.sample is None else _SOME)
        for item in batch.items
    )
    return replace(batch, items=tuple(items))
