"""How long things take: the cost model of one worker, its link and its messages.

Seconds, tokens, bytes. A prompt's work is linear in its tokens and, for attention, in the pairs of
a token and one before it; a decode step's is a base, a share for each sequence and one for each
token of context that it reads. `bench.sim.roofline` makes one of a GPU's data sheet, `tandem
calibrate` of a cluster that runs.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

_Cost = Annotated[float, Field(ge=0)]
_Speed = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What no step can go below, whatever the code: each operation and each byte once."""

    flops_per_s: _Speed
    bytes_per_s: _Speed
    weight_bytes: _Speed
    token_flops: _Speed
    pair_flops: _Speed
    kv_token_bytes: _Speed

    def step_s(
        self, *, prompt_tokens: int, prompt_pairs: float, num_decodes: int, context_tokens: int
    ) -> float:
        """The least time of a step, the operations and the bytes fully overlapped."""
        flops = (prompt_tokens + num_decodes) * self.token_flops + prompt_pairs * self.pair_flops
        num_bytes = self.weight_bytes + context_tokens * self.kv_token_bytes
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The coefficients. All workers of a cluster are alike."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    prefill_base_s: _Cost
    prefill_token_s: _Speed
    # For each pair of a prompt token and one that it attends to.
    prefill_pair_s: _Cost
    # The linear work of a prompt takes so much longer where it shares its step or comes in pieces.
    piece_factor: Annotated[float, Field(ge=1)] = 1.0
    decode_base_s: _Speed
    decode_seq_s: _Cost
    decode_token_s: _Cost
    # Tokens whose KV one worker holds, and the bytes of one.
    kv_tokens: _Count
    kv_token_bytes: _Count
    num_layers: _Count
    link_bytes_per_s: _Speed
    # For each piece that travels by itself: a layer of a block, or a block.
    link_piece_s: _Cost = 0.0
    # A hand-off's first and last word.
    link_fixed_s: _Cost = 0.0
    # One message between two processes, from one's code to the other's.
    control_s: _Cost = 0.0
    # From the client to the gateway's queue, and from a token to the client.
    front_s: _Cost = 0.0
    # A step takes this share longer for each other worker that computes when it begins.
    neighbour_slowdown: _Cost = 0.0
    floor: Floor | None = None

    def prompt_s(self, start: int, num_tokens: int, *, whole: bool) -> float:
        """The work of a chunk of a prompt behind `start` tokens, without the step's base."""
        factor = 1.0 if whole else self.piece_factor
        pairs = num_tokens * (start + num_tokens / 2)
        return factor * num_tokens * self.prefill_token_s + pairs * self.prefill_pair_s

    def prefill_s(self, num_tokens: int) -> float:
        """A step that reads one whole prompt."""
        return self.prefill_base_s + self.prompt_s(0, num_tokens, whole=True)

    def decode_s(self, num_seqs: int, context_tokens: int) -> float:
        """A step that only decodes."""
        return (
            self.decode_base_s + num_seqs * self.decode_seq_s + context_tokens * self.decode_token_s
        )

    def mixed_s(self, prompts_s: float, num_seqs: int, context_tokens: int) -> float:
        """A step that decodes, and has that much prompt work as well."""
        base_s = max(self.decode_base_s, self.prefill_base_s + prompts_s)
        return base_s + num_seqs * self.decode_seq_s + context_tokens * self.decode_token_s

    def transfer_s(self, num_tokens: int, num_blocks: int) -> float:
        """A link's time for the KV of these tokens, pushed layer by layer."""
        pieces_s = num_blocks * self.num_layers * self.link_piece_s
        return num_tokens * self.kv_token_bytes / self.link_bytes_per_s + pieces_s
