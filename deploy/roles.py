"""Which module each process of the cluster runs."""

from dataclasses import dataclass
from typing import Self

from core.config import ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Module names for `python -m`. Tests put small modules in their places."""

    scheduler: str = "scheduler"
    prefill: str = "prefill_worker"
    decode: str = "decode_worker"
    gateway: str = "gateway"
    # Prints the folder of a model's card on stdout.
    prepare: str = "engine.prepare"

    @classmethod
    def of(cls, config: ClusterConfig) -> Self:
        """Those of a cluster with this configuration."""
        if config.scheduler.elastic == "off":
            return cls()
        return cls(prefill="deploy.elastic.prefill", decode="deploy.elastic.decode")
