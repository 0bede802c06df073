"""Inside the workers: KV blocks, steps and hand-offs."""

from deploy.dashboards.board import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    PER_SECOND,
    SECONDS,
    SHARE,
    Board,
    Panel,
    Query,
    Row,
    quantiles,
    rate,
)

_CHOSEN = '{process=~"$process"}'

_BLOCKS = Row(
    title="KV blocks",
    panels=(
        Panel(
            title="KV blocks by state",
            unit=COUNT,
            queries=(Query(f"sum by (state) (tandem_kv_blocks{_CHOSEN})", "{{state}}"),),
            help="They sum to the pools. Quarantined blocks wait for proof that nobody writes.",
            stacked=True,
        ),
        Panel(
            title="KV blocks in use",
            unit=SHARE,
            queries=(Query(f"vllm:kv_cache_usage_perc{_CHOSEN}", "{{process}}"),),
            help="Neither free nor cached.",
        ),
        Panel(
            title="Prompt tokens found in the prefix cache",
            unit=SHARE,
            queries=(
                Query(
                    f"{rate(f'vllm:prefix_cache_hits_total{_CHOSEN}', 'process')} / "
                    f"{rate(f'vllm:prefix_cache_queries_total{_CHOSEN}', 'process')}",
                    "{{process}}",
                ),
            ),
            help="Of the tokens that were looked up.",
        ),
        Panel(
            title="Blocks taken from others",
            unit=PER_SECOND,
            queries=(
                Query(
                    rate(f"tandem_preemptions_total{_CHOSEN}", "process"), "{{process}} preempts"
                ),
                Query(
                    rate(f"tandem_blocks_evicted_total{_CHOSEN}", "process"), "{{process}} evicts"
                ),
            ),
            help="Preempted sequences are computed again; evicted blocks were only cached.",
        ),
    ),
)
_STEPS = Row(
    title="Steps",
    panels=(
        Panel(
            title="Time of a step",
            unit=SECONDS,
            queries=quantiles("tandem_step_seconds", _CHOSEN, "kind"),
            help="By what it held: prompts, decoding sequences, or both.",
        ),
        Panel(
            title="Sequences",
            unit=COUNT,
            queries=(
                Query(
                    f"sum by (process, state) (tandem_sequences{_CHOSEN})", "{{process}} {{state}}"
                ),
            ),
            help="Waiting: their first step or their prompt's KV is still to come.",
        ),
        Panel(
            title="Prompt tokens to read",
            unit=COUNT,
            queries=(Query(f"tandem_backlog_tokens{_CHOSEN}", "{{process}}"),),
            help="Accepted and not computed yet.",
        ),
        Panel(
            title="Step loops that stand still",
            unit=SECONDS,
            queries=(Query(f"tandem_step_stalled_seconds{_CHOSEN}", "{{process}}"),),
            help="A saw tooth as high as a step is usual; a slope is a hang.",
        ),
    ),
)
_HANDOFFS = Row(
    title="Hand-offs",
    panels=(
        Panel(
            title="Requests by hand-off state",
            unit=COUNT,
            queries=(
                Query(f"sum by (role, state) (tandem_leases{_CHOSEN})", "{{role}} {{state}}"),
            ),
            help="docs/handoff.md has the states. Adopted requests decode.",
            stacked=True,
        ),
        Panel(
            title="KV sent",
            unit=BYTES_PER_SECOND,
            queries=(
                Query(
                    rate(f"tandem_kv_transfer_bytes_sent_total{_CHOSEN}", "transport"),
                    "{{transport}}, over all time",
                ),
                Query(
                    f"{rate(f'tandem_kv_transfer_bytes_sent_total{_CHOSEN}', 'transport')} / "
                    f"{rate(f'tandem_kv_transfer_busy_seconds_total{_CHOSEN}', 'transport')}",
                    "{{transport}}, while sending",
                ),
            ),
            help="How much is sent, and how fast while something is.",
        ),
        Panel(
            title="Time to send one prompt's KV",
            unit=SECONDS,
            queries=quantiles("tandem_kv_transfer_seconds", _CHOSEN, "transport"),
            help="Spent writing; most of it beside the prompt's computation.",
        ),
        Panel(
            title="What must not happen",
            unit=PER_SECOND,
            queries=(
                Query(
                    rate(f"tandem_integrity_failures_total{_CHOSEN}", "process"),
                    "{{process}} damaged KV",
                ),
                Query(
                    rate(f"tandem_ledger_errors_total{_CHOSEN}", "process"),
                    "{{process}} lost blocks",
                ),
                Query(
                    rate(f"tandem_stale_messages_total{_CHOSEN}", "process"), "{{process}} stale"
                ),
            ),
            help="Stale messages are dropped and harm nobody; the others are faults.",
        ),
    ),
)
_PROCESSES = Row(
    title="Processes",
    panels=(
        Panel(
            title="Memory",
            unit=BYTES,
            queries=(Query(f"process_resident_memory_bytes{_CHOSEN}", "{{process}}"),),
            help="Resident; a KV pool counts as far as it was used.",
        ),
        Panel(
            title="CPU",
            unit=COUNT,
            queries=(Query(rate(f"process_cpu_seconds_total{_CHOSEN}", "process"), "{{process}}"),),
            help="Cores in use.",
        ),
    ),
)

WORKERS = Board(
    uid="tandem-workers",
    title="Tandem: workers",
    description="KV blocks, steps and hand-offs of each worker.",
    rows=(_BLOCKS, _STEPS, _HANDOFFS, _PROCESSES),
    by_process=True,
)
