"""What crosses a process boundary, as frozen dataclasses.

Each class has the name and the field names of its protobuf message, so that `core.codec` converts
it by reflection and a field that exists on one side only is an error at start. A message field that
may be absent is `X | None`. What each message means is said beside it in `protos/tandem/internal`.
"""

import enum
from dataclasses import dataclass, field


class StopReason(enum.IntEnum):
    """Why a request ended: exactly one of these."""

    UNSPECIFIED = 0
    EOS = 1
    STOP_SEQUENCE = 2
    LENGTH = 3
    CANCELLED = 4
    TIMEOUT = 5
    ERROR = 6


class WorkerRole(enum.IntEnum):
    """What a worker does."""

    UNSPECIFIED = 0
    PREFILL = 1
    DECODE = 2


class GrammarKind(enum.IntEnum):
    """In what language a grammar's text is written."""

    UNSPECIFIED = 0
    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRef:
    """A process at one start of its life."""

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A worker and the gRPC target where it listens (`host:port` or `unix:path`)."""

    worker: WorkerRef
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferId:
    """One attempt of one request; names its hand-off everywhere."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """What is added to one token's logit."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must be, whole: a document of a schema, a match of a regex, a word of Lark."""

    kind: GrammarKind
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log probabilities at one position: of the token there, and of the likeliest ones.

    Of the model's own distribution, before bias, penalties and temperature. The likeliest come
    first; of equal ones, the smaller id.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling as the engine takes it: every value resolved and in range.

    `temperature` 0 is greedy. `top_k` 0 is off. `stop_token_ids` end the answer and are counted as
    part of it; the model's own end-of-sequence ids do the same unless `ignore_eos`. Neither is
    sampled among the first `min_tokens`. With `logprobs` every token comes with its log
    probability and those of the `top_logprobs` likeliest; with `prompt_logprobs` so does every
    token of the prompt but the first. Under a `grammar` an end-of-sequence id comes only where the
    grammar is complete, and then whatever `min_tokens` says.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[TokenBias, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error on the wire; `core.errors` turns it into an exception and back."""

    code: str
    message: str
    culprit: WorkerRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Nothing happened, but the sender lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTrace:
    """A request is to be traced in hindsight; see `core.telemetry.tracer`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A signature over what the message around it says; `core.tickets` makes and checks it."""

    expires_unix_s: float
    mac: bytes = field(repr=False)
    leader_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """What two workers must agree on before one reads the other's KV blocks."""

    model: str
    revision: str
    dtype: str
    block_size: int
    # Where one rank has all heads.
    block_bytes: int
    layout: str
    protocol: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTiming:
    """The hand-off's part of the time to first token, in seconds."""

    grant_s: float = 0.0
    prefill_wait_s: float = 0.0
    prefill_compute_s: float = 0.0
    transfer_tail_s: float = 0.0
    adopt_s: float = 0.0

    @property
    def total_s(self) -> float:
        """From the Start in the decode worker until the first token left it."""
        prefill_s = self.prefill_wait_s + self.prefill_compute_s
        return self.grant_s + prefill_s + self.transfer_tail_s + self.adopt_s


# --- gateway <-> scheduler ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    transfer: TransferId
    prefill: WorkerRef | None
    decode: WorkerRef
    prompt_tokens: int
    max_new_tokens: int
    num_choices: int = 1
    tenant: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHello:
    gateway: WorkerRef
    holdings: tuple[Holding, ...] = ()
    admin_address: str = ""
    leader_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue:
    transfer: TransferId
    model: str
    prompt_tokens: int
    max_new_tokens: int
    remaining_s: float
    excluded_workers: tuple[str, ...] = ()
    num_choices: int = 1
    tenant: str = ""
    priority: int = 0
    block_hashes: tuple[int, ...] = field(default=(), repr=False)
    explain: bool = False
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to serve a request, and what it was expected to cost, in seconds.

    The scheduler takes the way with the least `ttft_s + lateness_s`.
    """

    prefill: str
    decode: str
    ttft_s: float
    lateness_s: float
    transfer_s: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request was placed where it was. The first candidate is the one that was taken."""

    reason: str
    num_candidates: int
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    transfer: TransferId
    prefill: Endpoint | None
    decode: Endpoint
    queue_s: float
    ticket: Ticket | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    prefill_workers: int
    decode_workers: int
    not_ready: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    transfer: TransferId
    failure: Failure
    retry_after_s: float


# --- worker <-> scheduler ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """The block pool by state. The five sum to the pool, always."""

    free: int
    owned: int = 0
    in_transfer: int = 0
    cached: int = 0
    quarantined: int = 0

    @property
    def total(self) -> int:
        return self.free + self.owned + self.in_transfer + self.cached + self.quarantined


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    endpoint: Endpoint
    role: WorkerRole
    compatibility: Compatibility
    num_blocks: int
    max_seqs: int
    max_step_tokens: int
    local_prefill: bool = False
    admin_address: str = ""
    elastic: bool = False
    leader_token: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    name: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step costs on one worker, fitted to what was measured there, in seconds.

    A step takes `base_s`, `decode_s` for each sequence that decodes, `token_s` for each prompt
    token, and `pair_s` for each pair of a prompt token and one that it attends to.
    """

    base_s: float = 0.0
    decode_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    blocks: BlockCounts
    num_running: int
    num_waiting: int
    draining: bool = False
    counters: tuple[Counter, ...] = ()
    num_preempted: int = 0
    backlog_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    cost: StepCost | None = None
    turning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNews:
    """What a worker's prefix cache has gained and lost since the last news.

    Blocks go by the first eight bytes of their hash (`core.block_hash.short`). With `whole`,
    `published` is all that there is.
    """

    whole: bool = False
    published: tuple[int, ...] = field(default=(), repr=False)
    evicted: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    scheduler: str
    leader_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway:
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    leader_address: str = ""
    leader_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The worker is to serve this role from now on."""

    role: WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What runs on the worker is to go on at its peers."""


# --- gateway <-> decode worker -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachHello:
    gateway: WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachWelcome:
    decode: WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    choice: int
    sent_token_ids: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    transfer: TransferId
    decode: WorkerRef
    prefill: Endpoint | None
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    remaining_s: float
    ticket: Ticket | None = None
    branches: tuple[Branch, ...] = (Branch(choice=0),)
    cache_salt: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    transfer: TransferId
    reason: StopReason
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    transfer: TransferId
    token_ids: tuple[int, ...]
    timing: HandoffTiming | None = None
    cached_tokens: int = 0
    choice: int = 0
    stop_reason: StopReason = StopReason.UNSPECIFIED
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    transfer: TransferId
    reason: StopReason
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    tokens: tuple[Tokens, ...] = ()
    ended: tuple[Ended, ...] = ()


# --- decode worker <-> prefill worker ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    name: str
    address: str
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffHello:
    decode: WorkerRef
    compatibility: Compatibility
    offers: tuple[TransportOffer, ...]
    # That share the receiver's model: a block of its pool is their parts, one behind the other.
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffWelcome:
    prefill: WorkerRef
    transport: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    transfer: TransferId
    prefill: WorkerRef
    token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    remaining_s: float
    num_prompt_tokens: int
    ticket: Ticket | None = None
    cache_salt: str = ""
    first_block: int = 0
    choice: int = 0
    shared: bool = False
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfer:
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    transfer: TransferId
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSent:
    transfer: TransferId
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    transfer: TransferId
    logprobs: tuple[TokenLogprobs, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    transfer: TransferId
    first_token_id: int
    cached_tokens: int
    digests: tuple[int, ...]
    stop_reason: StopReason
    prefill_wait_s: float
    prefill_compute_s: float
    first_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced:
    transfer: TransferId
    failure: Failure | None = None


ScheduleMessage = GatewayHello | Enqueue | Withdraw | Prefilled | Settle | KeepTrace
PlacementMessage = Placement | Rejection | PoolSizes | Welcome | Standby
RegisterMessage = WorkerHello | WorkerLoad | CacheNews
AttachMessage = AttachHello | Start | Cancel | KeepTrace
HandoffMessage = HandoffHello | Prefill | CancelTransfer | Adopted | KeepTrace
HandoffReply = HandoffWelcome | Accepted | Refused | ChunkSent | PromptScored | Commit | Quiesced
