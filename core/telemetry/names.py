"""Every span, event and attribute name that this system gives away, in one place.

Those of `gen_ai.*`, `http.*`, `rpc.*` and `error.*` are OpenTelemetry's semantic conventions, of
which the first are still moving; `tandem.*` is ours. docs/observability.md explains them.
"""

from enum import StrEnum


class Role(StrEnum):
    """The kinds of processes; each is a service of its own."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREFILL_WORKER = "prefill-worker"
    DECODE_WORKER = "decode-worker"


class Operation(StrEnum):
    """What a request asks for: the first word of its SERVER span, and `gen_ai.operation.name`."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


PROVIDER = "tandem"


class SpanName(StrEnum):
    """The stages of a request, each in the process where it happens."""

    VALIDATE = "validate"
    RENDER = "render"
    TOKENISE = "tokenise"
    ATTEMPT = "attempt"
    FLUSH = "flush"
    QUEUE = "queue"
    RESERVE = "reserve"
    KV_RECEIVE = "kv_receive"
    ADOPT = "adopt"
    DECODE = "decode"
    PREFILL = "prefill"
    KV_TRANSFER = "kv_transfer"
    STEP = "step"


class Event(StrEnum):
    """What happens within a span."""

    CHUNK = "chunk"
    TOKENS = "tokens"
    PREEMPTED = "preempted"
    MIGRATED = "migrated"


class Attr(StrEnum):
    """What is said of a span."""

    # OpenTelemetry's.
    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_CHOICES = "gen_ai.request.choice.count"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
    RESPONSE_TTFT = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    HTTP_METHOD = "http.request.method"
    HTTP_PATH = "url.path"
    HTTP_STATUS = "http.response.status_code"
    RPC_SYSTEM = "rpc.system.name"
    RPC_METHOD = "rpc.method"
    RPC_STATUS = "rpc.response.status_code"
    ERROR_TYPE = "error.type"
    # Ours.
    REQUEST_ID = "tandem.request.id"
    TENANT = "tandem.tenant"
    KEPT = "tandem.kept"
    ATTEMPT = "tandem.attempt"
    PREFILL_WORKER = "tandem.prefill.worker"
    DECODE_WORKER = "tandem.decode.worker"
    PLACEMENT = "tandem.placement"
    QUEUED = "tandem.queue.length"
    LOCAL = "tandem.prefill.local"
    WAIT_S = "tandem.prefill.wait_s"
    COMPUTE_S = "tandem.compute_s"
    CACHED = "tandem.cached_tokens"
    COMPUTED = "tandem.computed_tokens"
    TRANSPORT = "tandem.kv.transport"
    BLOCKS = "tandem.kv.blocks"
    BYTES = "tandem.kv.bytes"
    GB_PER_S = "tandem.kv.gb_per_s"
    BY_LAYER = "tandem.kv.by_layer"
    TOKENS = "tandem.tokens"
    TOKENS_BEFORE = "tandem.tokens_before"
    PREEMPTIONS = "tandem.preemptions"
    SEQUENCES = "tandem.step.sequences"
    STEP_NUMBER = "tandem.step.number"


class Kept(StrEnum):
    """Why a request that was not sampled is told of all the same."""

    ERROR = "error"
    SLO_TTFT = "slo_ttft"
    SLO_TPOT = "slo_tpot"
