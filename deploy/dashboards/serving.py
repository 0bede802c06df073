"""What clients feel, and where their time goes: the board to look at first."""

from deploy.dashboards.board import (
    COUNT,
    PER_SECOND,
    REQUESTS_PER_SECOND,
    SECONDS,
    SHARE,
    Board,
    Panel,
    Query,
    Row,
    mean,
    quantiles,
    rate,
)

_REQUESTS = Row(
    title="Requests",
    panels=(
        Panel(
            title="Requests by outcome",
            unit=REQUESTS_PER_SECOND,
            queries=(Query(rate("tandem_requests_total", "outcome"), "{{outcome}}"),),
            help="Failed and timeout are the server's doing; refused is the client's.",
            stacked=True,
        ),
        Panel(
            title="Goodput",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    rate('tandem_slo_good_requests_total{objective="both"}'),
                    "within both objectives",
                ),
                Query(rate("tandem_slo_requests_total"), "all that count"),
            ),
            help="Answers within telemetry.slo_ttft_s and slo_tpot_s, beside all that count.",
        ),
        Panel(
            title="Within the objectives",
            unit=SHARE,
            queries=(
                Query(
                    f"{rate('tandem_slo_good_requests_total', 'objective')} / on () group_left "
                    f"{rate('tandem_slo_requests_total')}",
                    "{{objective}}",
                ),
            ),
            help="The share of requests within each objective; alerts watch both.",
        ),
        Panel(
            title="Requests that were not answered, by reason",
            unit=REQUESTS_PER_SECOND,
            queries=(
                Query(
                    rate('tandem_requests_total{outcome!="answered"}', "outcome, reason"),
                    "{{outcome}}: {{reason}}",
                ),
            ),
            help="Error codes as in docs/api.md.",
            stacked=True,
        ),
    ),
)
_LATENCY = Row(
    title="Latency",
    panels=(
        Panel(
            title="Time to first token",
            unit=SECONDS,
            queries=quantiles("gen_ai_server_time_to_first_token_seconds"),
            help="From a request's arrival to its first token, of finished answers.",
        ),
        Panel(
            title="Time between tokens",
            unit=SECONDS,
            queries=quantiles("vllm:inter_token_latency_seconds"),
            help="Every gap between two tokens of an answer (ITL).",
        ),
        Panel(
            title="Where the time to first token goes",
            unit=SECONDS,
            queries=(Query(mean("tandem_stage_seconds", "stage"), "{{stage}}"),),
            help="Mean of each stage; together they are the mean time to first token.",
            stacked=True,
        ),
        Panel(
            title="Whole requests",
            unit=SECONDS,
            queries=quantiles("gen_ai_server_request_duration_seconds", '{error_type=""}'),
            help="From a request's arrival to the end of its answer.",
        ),
    ),
)
_LOAD = Row(
    title="Load",
    panels=(
        Panel(
            title="Tokens",
            unit=PER_SECOND,
            queries=(
                Query(rate("vllm:prompt_tokens_total"), "prompt"),
                Query(rate("vllm:prompt_tokens_cached_total"), "prompt, from a cache"),
                Query(rate("vllm:generation_tokens_total"), "answer"),
            ),
            help="Tokens per second of all requests.",
        ),
        Panel(
            title="Requests that wait and run",
            unit=COUNT,
            queries=(
                Query("sum by (reason) (tandem_queued_requests)", "queued: {{reason}}"),
                Query("sum (tandem_placed_requests)", "placed"),
                Query("sum (tandem_requests_in_flight)", "in the gateways"),
            ),
            help="A queue with reason no_workers does not drain until a worker comes.",
        ),
        Panel(
            title="Placements",
            unit=PER_SECOND,
            queries=(Query(rate("tandem_placements_total", "kind"), "{{kind}}"),),
            help="Disaggregated: read by a prefill worker. Local: by the decode worker itself.",
            stacked=True,
        ),
        Panel(
            title="Tried again, or not",
            unit=PER_SECOND,
            queries=(
                Query(rate("tandem_retries_total", "reason"), "retried: {{reason}}"),
                Query(rate("tandem_requeues_total"), "queued again"),
                Query(rate("tandem_moves_total"), "moved: their worker turned or left"),
                Query(rate("tandem_rejections_total", "reason"), "rejected: {{reason}}"),
            ),
            help="Lost attempts go on elsewhere, unseen by their clients; rejected ones do not.",
        ),
        Panel(
            title="Workers that take work",
            unit=COUNT,
            queries=(
                Query('sum by (role) (tandem_workers{state="ready"})', "{{role}}"),
                Query("sum by (role) (tandem_workers_configured)", "{{role}}, configured"),
                Query("sum by (role) (tandem_workers_wanted)", "{{role}}, wanted"),
            ),
            help="Below what is configured, a worker is loading, draining or lost. "
            "Wanted: what the demand could use.",
        ),
    ),
)

SERVING = Board(
    uid="tandem-serving",
    title="Tandem: serving",
    description="What clients feel, and where their time goes.",
    rows=(_REQUESTS, _LATENCY, _LOAD),
)
