"""The bounds of histograms.

Those of `gen_ai.server.*` are OpenTelemetry's (semantic conventions for generative AI metrics),
those of `vllm:*` are vLLM's own: a board or a rule made for either reads ours as well.
"""

GENAI_DURATION_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GENAI_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GENAI_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

VLLM_TTFT_S = (*GENAI_TTFT_S, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
VLLM_TPOT_S = (*GENAI_TPOT_S, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
VLLM_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_STEP_TOKENS = (*(1, 8), *(2**power for power in range(4, 15)))
VLLM_CHOICES = (1, 2, 5, 10, 20)

# A stage of the time to the first token: from what a render takes to a queue that is far too long.
STAGE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
STEP_S = (*(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),)
TRANSFER_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
TRANSFER_BYTES = tuple(float(4**power) for power in range(7, 18))  # 16 KiB to 16 GiB
TRANSFER_GB_PER_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)


def token_counts(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to `most` tokens, as vLLM's histograms of lengths have them."""
    bounds = (factor * 10**power for power in range(len(str(most))) for factor in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)
