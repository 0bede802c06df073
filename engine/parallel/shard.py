"""Which part of a model is one rank's: its heads, its inner columns, its words."""

from dataclasses import dataclass, replace

from core.errors import ConfigError
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `ranks`. Heads, KV heads, inner columns and words go to the ranks in order.

    Where there are more ranks than KV heads, each KV head is with several ranks, next to each
    other. The vocabulary is padded to a multiple of the ranks.
    """

    rank: int = 0
    ranks: int = 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """What the model is to this rank: a decoder of its heads, columns and words alone."""
        return replace(
            config,
            num_heads=config.num_heads // self.ranks,
            num_kv_heads=max(1, config.num_kv_heads // self.ranks),
            intermediate_size=config.intermediate_size // self.ranks,
            vocab_size=-(-config.vocab_size // self.ranks),
        )

    def part_of(self, size: int) -> slice:
        """This rank's of `size` things that all ranks share evenly, the last perhaps fewer."""
        share = -(-size // self.ranks)
        return slice(min(size, self.rank * share), min(size, (self.rank + 1) * share))

    def kv_heads_of(self, num_kv_heads: int) -> slice:
        """This rank's KV heads."""
        if num_kv_heads >= self.ranks:
            return self.part_of(num_kv_heads)
        head = self.rank * num_kv_heads // self.ranks
        return slice(head, head + 1)


WHOLE = Shard()


def check_ranks(config: ModelConfig, ranks: int, setting: str) -> None:
    """Raises ConfigError, in one line, where `ranks` ranks cannot share the model evenly.

    `setting` is the name of what asks for so many.
    """
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    why = None
    if heads % ranks:
        why = f"{heads} attention heads"
    elif kv_heads % ranks and ranks % kv_heads:
        why = f"{kv_heads} KV heads, nor is it a multiple of them"
    elif inner % ranks:
        why = f"intermediate_size of {inner}"
    if why is not None:
        raise ConfigError(f"{setting}: {ranks} does not divide the model's {why}{_others(config)}")


def _others(config: ModelConfig) -> str:
    """What this model can be shared by."""
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    fit = [
        str(n)
        for n in range(1, heads + 1)
        if not (heads % n or inner % n) and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    return f"; it can be {', '.join(fit)}"
