"""Configuration: read once, validated, frozen, handed down.

An operator writes a TOML file or flags; the launcher makes one `ClusterConfig` of them and stores
it as `cluster.json` in the run directory, where every process of the cluster reads it.
"""

import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from core.config_section import Section
from core.errors import ConfigError
from core.model_settings import (
    MAX_MODELS,
    Dtype,
    KvCacheDtype,
    ModelSettings,
    ToolParser,
    twice,
)

DEFAULT_MODEL = "smollm2-135m-instruct"
CLUSTER_FILE = "cluster.json"
# Addresses to listen on that mean every address of this machine.
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})
TransportName = Literal["auto", "shm", "tcp", "collective", "nixl", "cuda_ipc"]
# Of either role, over all models.
MAX_WORKERS = 64


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class GatewayConfig(Section):
    """The public side."""

    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(50051, ge=0, le=65535)
    # After being told to stop: for so long it says that it is not ready and serves all the same,
    # so that load balancers have seen it before connections are refused.
    lame_duck_s: float = Field(0.0, ge=0)
    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    max_stop_strings: int = Field(16, ge=0)
    max_stop_chars: int = Field(256, ge=1)
    # Answers to one prompt (n), likeliest tokens told with each token, entries of one logit_bias.
    max_choices: int = Field(16, ge=1, le=128)
    max_logprobs: int = Field(20, ge=0, le=1000)
    max_logit_bias: int = Field(1024, ge=0)
    # Log probabilities told of one prompt: its tokens times one and the likeliest told with each.
    max_prompt_logprobs: int = Field(2**18, ge=0)
    # Bytes of one JSON schema, regular expression or grammar.
    max_grammar_bytes: int = Field(65536, ge=1)
    # How the model writes calls of tools; auto: what its chat template shows.
    tool_parser: ToolParser = "auto"
    # Tokens of one prompt. None: as many as leave room for one of the answer.
    max_prompt_tokens: int | None = Field(None, ge=1)
    # The longest answer where a request does not say. None: what the window has left.
    default_max_tokens: int | None = Field(None, ge=1)
    # gRPC calls at once on one connection; a client's further ones wait.
    max_concurrent_streams: int = Field(1024, ge=1)
    # A gRPC connection of this age takes no new calls, so that clients connect again and spread
    # over all gateways; calls in flight have the grace to end. 0: connections stay.
    max_connection_age_s: float = Field(1800.0, ge=0)
    max_connection_age_grace_s: float = Field(600.0, ge=0)
    # Tokens of one answer that its client has not read; a slower one gets an error.
    max_unread_tokens: int = Field(4096, ge=16)
    # Serves grpc.channelz.v1, which shows every connection of this process.
    channelz: bool = False
    # Serves vllm.grpc.engine.VllmEngine on the gRPC port, for smg's router; needs the extra `smg`.
    vllm_engine: bool = False
    # A request without its own deadline gets this one.
    default_timeout_s: float = Field(600.0, gt=0)
    # Lost requests are tried again within this share of all requests, and this many at once.
    retry_budget_ratio: float = Field(0.1, ge=0, le=1)
    retry_budget_floor: int = Field(64, ge=0)
    # A prompt that cost two workers is refused for this long.
    quarantine_s: float = Field(60.0, ge=0)
    # Unknown JSON fields are a 400 instead of being dropped and named in a response header.
    strict_fields: bool = False
    # Who may call, and how much: see core/api_keys.py. None: nobody is asked for a key.
    api_keys_file: str | None = None
    # An address beyond this machine is served although nobody is asked who they are.
    insecure: bool = False
    # PEM files. With a client CA, only clients with a certificate of it get a connection.
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    # A streamed answer that is silent for this long, in the queue say, gets a comment line.
    sse_keepalive_s: float = Field(15.0, gt=0)
    # A client whose stream was cut off may go on with it for so long, at any gateway that shares a
    # Redis. A stream of more bytes, eight for a token, is not kept.
    resume: bool = False
    resume_ttl_s: float = Field(120.0, ge=1, le=86400)
    resume_max_bytes: int = Field(256 * 2**10, ge=1024)
    # Web pages of these origins may call; "*" is every origin.
    cors_origins: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @property
    def loopback(self) -> bool:
        """Whether the host is an address that only this machine can reach."""
        return _is_loopback(self.host)

    @property
    def asks_who_calls(self) -> bool:
        """Whether a caller must show a key or a certificate."""
        return self.api_keys_file is not None or self.tls_client_ca_file is not None

    @model_validator(mode="after")
    def _tls_files_belong_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise PydanticCustomError("half_tls", "tls_cert_file and tls_key_file go together")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise PydanticCustomError("no_tls", "tls_client_ca_file needs tls_cert_file")
        return self

    @model_validator(mode="after")
    def _nobody_unknown_from_elsewhere(self) -> Self:
        if not (self.loopback or self.asks_who_calls or self.insecure):
            raise PydanticCustomError(
                "exposed",
                "host {host} can be reached from other machines, and nobody is asked for a key: "
                "set api_keys_file or tls_client_ca_file, or insecure (--insecure) to allow it",
                {"host": self.host},
            )
        return self


class SchedulerConfig(Section):
    """The queue."""

    admin_host: str = "127.0.0.1"
    admin_port: int = Field(8001, ge=0, le=65535)
    max_queued: int = Field(1024, ge=1)
    # Requests of one model that hold a placement at once. None: as many as its workers have room
    # for.
    max_running: int | None = Field(None, ge=1)
    report_interval_s: float = Field(1.0, gt=0)
    # Whether decode workers may read prompts themselves: where that is sooner, never, or always.
    local_prefill: Literal["auto", "never", "always"] = "auto"
    # Room that a decode worker keeps for an answer at first; longer ones take what is free then.
    reserve_answer_tokens: int = Field(256, ge=1)
    # auto: workers turn between prefill and decode as the demand has it, or `tandem scale`.
    elastic: Literal["off", "auto"] = "off"
    # Workers of each role that there are at least and at most, where workers turn.
    min_prefill_workers: int = Field(1, ge=1, le=64)
    max_prefill_workers: int = Field(64, ge=1, le=64)
    min_decode_workers: int = Field(1, ge=1, le=64)
    max_decode_workers: int = Field(64, ge=1, le=64)
    # A worker turns where another split has been better for so long, so long after the last turn.
    elastic_patience_s: float = Field(10.0, ge=0)
    elastic_cooldown_s: float = Field(15.0, ge=0)

    @model_validator(mode="after")
    def _bounds_are_bounds(self) -> Self:
        for role in ("prefill", "decode"):
            least = getattr(self, f"min_{role}_workers")
            most = getattr(self, f"max_{role}_workers")
            if least > most:
                raise PydanticCustomError(
                    "bounds",
                    "min_{role}_workers is {least}, above max_{role}_workers, {most}",
                    {"role": role, "least": least, "most": most},
                )
        return self


class EngineConfig(Section):
    """One worker's inference."""

    dtype: Dtype = "bfloat16"
    # auto: as `dtype`. fp8_e4m3: 8 bits and a scale for each head of each token.
    kv_cache_dtype: KvCacheDtype = "auto"
    # auto: a GPU where there is one. Worker n of the cluster takes GPU n, round and round.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Of a GPU's memory, for all the workers that take it: weights, activations, KV pools.
    gpu_memory_share: float = Field(0.9, gt=0, le=1)
    # Decode steps on a GPU are launched as graphs, captured at the start for some batch sizes.
    cuda_graphs: bool = True
    # auto: on a CPU the native kernels, on a GPU Triton's, or torch's where those cannot be had.
    kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    # auto: that of the kernels; on a GPU a flash-attention package comes first where there is one.
    attention: Literal["auto", "torch", "triton", "flash"] = "auto"
    # fp8: the layers' matrices, and what they are multiplied with, in 8 bits.
    quantisation: Literal["none", "fp8"] = "none"
    # Products of so few rows read weights as a GGUF file quantises them, beside those in bfloat16.
    # 0: never; then a token's logits have the same bits whatever shares its step.
    quantised_rows: int = Field(4, ge=0, le=14)
    block_size: int = Field(16, ge=1, le=1024)
    # The KV block pool of one worker. None: on a CPU 2 GiB for a prefill worker and 4 GiB for a
    # decode worker, of which pages are touched only as they are used; on a GPU what its memory has
    # left after weights and activations.
    prefill_kv_bytes: int | None = Field(None, ge=1)
    decode_kv_bytes: int | None = Field(None, ge=1)
    # Processes that share one worker's model, each with a slice of every layer and of the KV pool.
    prefill_tensor_parallel: int = Field(1, ge=1, le=16)
    decode_tensor_parallel: int = Field(1, ge=1, le=16)
    # Prompt tokens that one step computes, and sequences that one step holds.
    max_step_tokens: int = Field(512, ge=1)
    max_seqs: int = Field(64, ge=1)
    # Prompts that begin alike share their KV blocks, within a worker and a tenant.
    prefix_cache: bool = True
    # A decode worker takes prompts of its own in pieces small enough that a step stays within this.
    # 0: pieces of max_step_tokens, as a colocated engine takes them.
    itl_target_s: float = Field(0.05, ge=0)
    # Of the model's own window, at most this many tokens. None: the whole window.
    max_model_len: int | None = Field(None, ge=1)
    # A grammar that is not compiled, or a mask that is not made, in this time fails its request.
    grammar_timeout_s: float = Field(5.0, gt=0)
    # Threads of one worker's compute. None: the machine's cores divided by the workers.
    threads: int | None = Field(None, ge=1)

    @property
    def numbers(self) -> str:
        """What KV is computed in: workers that differ in it do not hand over to each other."""
        said = self.dtype if self.quantisation == "none" else f"{self.dtype}, {self.quantisation}"
        return f"{said}, KV {self.kv_cache_dtype}" if self.kv_fp8 else said

    @property
    def kv_fp8(self) -> bool:
        """Whether the KV cache is in FP8."""
        return self.kv_cache_dtype == "fp8_e4m3"


class TransferConfig(Section):
    """The hand-off."""

    # auto: shm where both ends are on one host, else tcp.
    # collective, nixl and cuda_ipc only where they are named.
    transport: TransportName = "auto"
    tcp_host: str = "127.0.0.1"
    # A prefill worker must answer a Prefill within this time.
    accept_timeout_s: float = Field(2.0, gt=0)
    # After a commit the sender waits this long for the receiver's word.
    adopt_timeout_s: float = Field(10.0, gt=0)
    # After a commit the receiver waits this long for bytes that are still on their way.
    arrive_timeout_s: float = Field(5.0, gt=0)
    # auto: each link's own measurements decide whether the last chunk leaves layer by layer.
    push: Literal["auto", "blocks", "layers"] = "auto"
    # Faults that the sending side makes on purpose, for tests: see kv_transfer/faulty.py.
    faults: str = ""


class NetworkConfig(Section):
    """How processes of one cluster reach each other where no launcher started them all."""

    # host:port of each scheduler. None: everybody is on this machine, and Unix sockets will do.
    schedulers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    # The address and the port that this process listens on for the others; 0: any free one, and for
    # a scheduler the port of the first address above. No host: the address below.
    host: str | None = None
    port: int = Field(0, ge=0, le=65535)
    # The address by which others reach this process, such as a pod's. None: `host`, and where that
    # is None too, they are on this machine.
    advertise_host: str | None = None

    @property
    def listens_on(self) -> str:
        """The address that this process listens on for the others."""
        return self.host or self.reached_at

    @property
    def reached_at(self) -> str:
        """The address that others are told."""
        return self.advertise_host or self.host or "127.0.0.1"

    @field_validator("schedulers")
    @classmethod
    def _hosts_and_ports(cls, schedulers: tuple[str, ...]) -> tuple[str, ...]:
        for given in schedulers:
            host, _, port = given.rpartition(":")
            if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
                raise PydanticCustomError(
                    "not_host_port",
                    "{given} is not host:port with a port in 1 … 65535",
                    {"given": repr(given)},
                )
        return schedulers

    @model_validator(mode="after")
    def _others_can_call(self) -> Self:
        if self.schedulers and self.reached_at in WILDCARD_HOSTS:
            raise PydanticCustomError(
                "nowhere",
                "host {host} is no address that others can call: set advertise_host",
                {"host": self.reached_at},
            )
        return self


class InternalTlsConfig(Section):
    """What processes that meet over TCP show each other. All three files, or none."""

    # PEM files. The CA is the cluster's own: whoever has a certificate of it is of the cluster.
    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    # The DNS name that every process's certificate has. Addresses are not compared.
    name: str = Field("tandem", pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        files = {name: getattr(self, name) for name in ("cert_file", "key_file", "ca_file")}
        lacking = [name for name, path in files.items() if path is None]
        if lacking and (len(lacking) < len(files) or "name" in self.model_fields_set):
            raise PydanticCustomError(
                "half_internal_tls",
                "cert_file, key_file and ca_file go together; not set: {lacking}",
                {"lacking": ", ".join(lacking)},
            )
        return self


class RedisConfig(Section):
    """What several schedulers and gateways share. Without a URL each has its own, in memory."""

    # redis://[USER:PASSWORD@]HOST:PORT/DB, rediss://… or unix:///PATH. None: TANDEM_REDIS_URL, and
    # where that is not set there is no Redis.
    url: str | None = Field(None, repr=False)
    # Of every key.
    prefix: str = Field("tandem", pattern=r"^[A-Za-z0-9_.{}-]{1,64}$")
    # A call that takes longer fails, and until Redis answers again none is made.
    timeout_s: float = Field(0.05, gt=0, le=5)
    # A leader that is silent for this long is replaced.
    lease_s: float = Field(1.5, ge=0.2, le=60)


class TelemetryConfig(Section):
    """What the cluster tells of itself."""

    # Where every process but the scheduler serves metrics and health; that one has its own port.
    admin_host: str = "127.0.0.1"
    # The gateway's port. The workers' follow it one by one, prefill first. 0: any free ones.
    admin_port: int = Field(0, ge=0, le=65535)
    # An answer counts as good where its first token came within the first, and the others followed
    # within the second, on average.
    slo_ttft_s: float = Field(2.0, gt=0)
    slo_tpot_s: float = Field(0.1, gt=0)
    # A worker that has something to compute, and has ended no step for so long, is not alive.
    stalled_after_s: float = Field(60.0, gt=0)
    # Where traces go: http://HOST:PORT, or https, of a collector that takes OTLP over gRPC. None:
    # OTEL_EXPORTER_OTLP_ENDPOINT, and where that is not set nobody traces.
    otlp_endpoint: str | None = None
    # Where metrics are pushed, in the same form. None: OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, and
    # where that is not set they are only there to be scraped.
    otlp_metrics_endpoint: str | None = None
    # The share of requests that are traced where their callers have not decided. None: what
    # OTEL_TRACES_SAMPLER says, else all of them.
    sample_ratio: float | None = Field(None, ge=0, le=1)
    # Requests that fail, or miss a target above, are traced whatever the share.
    keep_errors: bool = True
    keep_slo_misses: bool = True
    # Spans of so many requests wait in each process for word that they are to be kept.
    tail_requests: int = Field(4096, ge=1)
    # Spans that wait for the collector; more are dropped and counted.
    max_queued_spans: int = Field(16384, ge=1)
    # Requests that the gateway's page and `tandem trace` tell of, the last ones. 0: none.
    recent_requests: int = Field(500, ge=0, le=100_000)
    # Tokens of an answer from one event of its decode span to the next.
    tokens_per_event: int = Field(32, ge=1)


class RayConfig(Section):
    """Where `tandem serve --on ray` puts the workers. They lie in one placement group."""

    # spread: on as many nodes as there are, pack: on as few, where links between them are slow.
    placement: Literal["spread", "pack"] = "spread"
    cpus_per_worker: int = Field(1, ge=1)
    # None: one where there are GPUs and `engine.device` is not "cpu".
    gpus_per_worker: int | None = Field(None, ge=0, le=8)
    # Adds and removes workers as the demand wants, within the scheduler's bounds for each role.
    autoscale: bool = False


class ClusterConfig(Section):
    """Everything that one cluster is told."""

    # A GGUF file, a Hugging Face directory, a hub id, or the default model's name.
    model: str = DEFAULT_MODEL
    # The name in the API. None: derived from `model`.
    served_name: str | None = None
    # Each serves HTTP and gRPC on ports of its own: those after the first one's, one by one.
    gateways: int = Field(1, ge=1, le=64)
    # 0: the decode workers read the prompts themselves.
    prefill_workers: int = Field(1, ge=0, le=64)
    decode_workers: int = Field(1, ge=1, le=64)
    # One leads, the others stand by; more than one need Redis.
    schedulers: int = Field(1, ge=1, le=8)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "pretty"] = "auto"
    # Holds the secret under which tickets are signed. None: TANDEM_SECRET, else a random one.
    secret_file: str | None = None
    # A process whose event loop stands still for this long is killed and started again.
    frozen_after_s: float = Field(6.0, ge=2)
    # How long a stop waits for running requests.
    drain_timeout_s: float = Field(10.0, ge=0)
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    network: NetworkConfig = NetworkConfig()
    internal_tls: InternalTlsConfig = InternalTlsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    # Several models, each with its own workers. None given: `model` alone.
    models: Annotated[tuple[ModelSettings, ...], Field(strict=False, max_length=MAX_MODELS)] = ()

    @property
    def num_schedulers(self) -> int:
        """The one that leads and those that stand by, whoever starts them."""
        return max(self.schedulers, len(self.network.schedulers))

    @property
    def stop_s(self) -> float:
        """How long a process that is told to stop may go on serving."""
        return self.gateway.lame_duck_s + self.drain_timeout_s

    @property
    def each_model(self) -> tuple[ModelSettings, ...]:
        """The models, also where it is one."""
        return self.models or (ModelSettings(model=self.model, served_name=self.served_name),)

    def of_model(self, model: ModelSettings) -> Self:
        """What a cluster of this model alone would be told."""
        own = {"model": model.model, "served_name": model.served_name, "models": ()}
        for name, settings in _OF_A_MODEL.items():
            if given := model.given(*settings):
                own[name] = getattr(self, name).model_copy(update=given)
        return self.model_copy(update=own | model.given("prefill_workers", "decode_workers"))

    def of_model_named(self, name: str | None) -> Self:
        """The same of the model that is served by this name, for a process of it alone.

        None: the only one. Raises ConfigError where there is none of that name, or several.
        """
        if name is None and len(self.each_model) == 1:
            return self.of_model(self.each_model[0])
        for model in self.each_model:
            if name is not None and name in (model.served_name, *model.aliases):
                return self.of_model(model)
        why = "is needed" if name is None else f"no model is served as {name}"
        named = [model.served_name for model in self.each_model if model.served_name is not None]
        raise ConfigError(f"--serves: {why}; there are: {', '.join(named) or 'none with a name'}")

    @property
    def num_workers(self) -> tuple[int, int]:
        """How many prefill workers and how many decode workers there are over all models."""
        each = [self.of_model(model) for model in self.each_model]
        return sum(one.prefill_workers for one in each), sum(one.decode_workers for one in each)

    @model_validator(mode="after")
    def _models_agree(self) -> Self:
        if self.models and (alone := self.model_fields_set & {"model", "served_name"}):
            raise PydanticCustomError(
                "model_and_models",
                "models: each has its own {alone}; the cluster's cannot be set beside them",
                {"alone": min(alone)},
            )
        names = [model.served_name for model in self.models if model.served_name is not None]
        names += [alias for model in self.models for alias in model.aliases]
        if (name := twice(names)) is not None:
            raise PydanticCustomError(
                "named_twice", "models: two names or aliases are {name}", {"name": repr(name)}
            )
        if self.gateway.vllm_engine and len(self.models) > 1:
            raise PydanticCustomError(
                "one_model",
                "gateway.vllm_engine: its protocol knows one model; here are {count}",
                {"count": len(self.models)},
            )
        return self

    @model_validator(mode="after")
    def _workers_suffice(self) -> Self:
        for model in self.each_model:
            own = self.of_model(model)
            if own.scheduler.local_prefill == "never" and own.prefill_workers == 0:
                raise PydanticCustomError(
                    "nobody_reads_prompts",
                    "scheduler.local_prefill: 'never' and prefill_workers is 0{where}: "
                    "nobody would read prompts",
                    {"where": f" for {model.served_name or model.model}" if self.models else ""},
                )
            if own.scheduler.elastic != "off":
                own._check_that_both_roles_can_be_served()
        if max(self.num_workers) > MAX_WORKERS:
            raise PydanticCustomError(
                "too_many_workers",
                "models: {prefill} prefill and {decode} decode workers; at most {most} of each",
                dict(zip(("prefill", "decode"), self.num_workers, strict=True))
                | {"most": MAX_WORKERS},
            )
        return self

    def _check_that_both_roles_can_be_served(self) -> None:
        if self.prefill_workers == 0:
            raise PydanticCustomError(
                "nobody_turns",
                "scheduler.elastic: 'auto' and prefill_workers is 0: begin with one",
            )
        least = self.scheduler.min_prefill_workers + self.scheduler.min_decode_workers
        there = self.prefill_workers + self.decode_workers
        engine = self.engine
        if engine.prefill_tensor_parallel != engine.decode_tensor_parallel:
            raise PydanticCustomError(
                "turns_with_one_pool",
                "scheduler.elastic: 'auto' needs engine.prefill_tensor_parallel, {prefill}, and "
                "engine.decode_tensor_parallel, {decode}, to be the same",
                {
                    "prefill": engine.prefill_tensor_parallel,
                    "decode": engine.decode_tensor_parallel,
                },
            )
        if least > there:
            raise PydanticCustomError(
                "too_few_workers",
                "scheduler: min_prefill_workers and min_decode_workers ask for {least} workers, of "
                "which there are {there}",
                {"least": least, "there": there},
            )

    @model_validator(mode="after")
    def _nobody_unknown_looks_in(self) -> Self:
        """Metrics and states are shown to whoever reaches them: held to what the API is."""
        if self.gateway.asks_who_calls or self.gateway.insecure:
            return self
        for section, host in (
            ("scheduler", self.scheduler.admin_host),
            ("telemetry", self.telemetry.admin_host),
        ):
            if not _is_loopback(host):
                raise PydanticCustomError(
                    "exposed_admin",
                    "{section}.admin_host {host} can be reached from other machines, and nobody is "
                    "asked for a key: set gateway.api_keys_file or gateway.tls_client_ca_file, or "
                    "gateway.insecure (--insecure) to allow it",
                    {"section": section, "host": host},
                )
        return self

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Reads an operator's file. Raises ConfigError that names the file and the field."""
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
        return cls.validated(values, source=str(path))

    @classmethod
    def validated(cls, values: dict[str, object], *, source: str) -> Self:
        """Checks values. Raises ConfigError that names the source and the field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            # What concerns several settings names them itself.
            words = (".".join(str(part) for part in first["loc"]), first["msg"])
            raise ConfigError(": ".join((source, *filter(None, words)))) from error

    def store(self, run_dir: Path) -> None:
        """Writes the file that the cluster's processes read; a reader sees all of it or the old."""
        partial = run_dir / f"{CLUSTER_FILE}.partial"
        partial.write_text(self.model_dump_json(exclude_unset=True))
        partial.replace(run_dir / CLUSTER_FILE)

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Reads what `store` wrote."""
        return cls.model_validate_json((run_dir / CLUSTER_FILE).read_text())


# Settings that a model may have of its own, by the section that has the cluster's.
_OF_A_MODEL = {
    "gateway": ("max_prompt_tokens", "default_max_tokens", "tool_parser"),
    "scheduler": ("max_queued", "max_running"),
    "engine": (
        *("max_model_len", "dtype", "kv_cache_dtype", "prefill_kv_bytes", "decode_kv_bytes"),
        *("prefill_tensor_parallel", "decode_tensor_parallel"),
    ),
}
