"""What reading, moving and decoding are expected to cost, in seconds, by what was measured.

The one currency of the policy is lateness: seconds that a first token comes later, and seconds that
the mean token of an answer comes later. A second of either is worth the same.
"""

from scheduler.view import ClusterView, Waiting, WorkerView

# A prompt's speed where no worker has measured any: only the first moments of a cluster see it.
_UNKNOWN_TOKENS_PER_S = 1000.0


def read_s(worker: WorkerView, prompt_tokens: int, cached_tokens: int, best: float) -> float:
    """Seconds in which the worker reads a prompt of which it has some KV already.

    A decode worker reads in pieces beside its decode steps. A prefill worker's steps are its own.
    Attention grows with the square of the prompt. `best` is the speed where it is not known.
    """
    unread = prompt_tokens - cached_tokens
    token_s = worker.read_token_s or 1.0 / (best or _UNKNOWN_TOKENS_PER_S)
    steps = -(-unread // worker.max_step_tokens)
    pairs = (prompt_tokens * prompt_tokens - cached_tokens * cached_tokens) / 2
    return steps * worker.read_step_s + unread * token_s + pairs * worker.read_pair_s


def backlog_s(worker: WorkerView, best: float, now_s: float) -> float:
    """Seconds until the worker has read what was placed on it."""
    if worker.busy_until_s is not None:
        return worker.busy_until_s - now_s if worker.busy_until_s > now_s else 0.0
    if not worker.backlog_tokens:
        return 0.0
    return worker.backlog_tokens / (worker.prefill_tokens_per_s or best or _UNKNOWN_TOKENS_PER_S)


def transfer_s(prefill: WorkerView, num_blocks: int, compute_s: float) -> float:
    """Seconds of the hand-off that no computing hides: blocks leave while later ones are computed.

    The last step's blocks are never hidden, and no more than the link takes leaves meanwhile.
    """
    if prefill.link_bytes_per_s <= 0:
        return 0.0
    same = prefill.compatibility
    per_block_s = same.block_bytes / prefill.link_bytes_per_s
    last = min(num_blocks, -(-prefill.max_step_tokens // same.block_size))
    return max(last * per_block_s, num_blocks * per_block_s - compute_s)


def stall_lateness_s(worker: WorkerView, prompt: int, cached: int, answer_tokens: float) -> float:
    """What the answers beside it lose where a decode worker reads a prompt itself.

    Each of them stands still for the prompt's compute, once, which is spread over its tokens.
    """
    cost = worker.cost
    if not worker.num_seqs or cost is None:
        return 0.0
    compute_s = (prompt - cached) * cost.token_s
    compute_s += cost.pair_s * (prompt * prompt - cached * cached) / 2
    return worker.num_seqs * compute_s / answer_tokens


def answer_s(view: ClusterView, waiting: Waiting) -> float:
    """Seconds from a request's first token to its last, on a decode worker as loaded as they are.

    0 where no step was measured yet.
    """
    return view.expected_answer_tokens(waiting) * view.measured.step_s


def service_cost(view: ClusterView, waiting: Waiting) -> float:
    """What a tenant is charged for a request: prompt tokens, and block-seconds of its answers.

    A block-second is counted like a token: a mean prompt and its answer's blocks then weigh about
    the same.
    """
    block_size = view.decodes[0].compatibility.block_size if view.decodes else 16
    answer = view.expected_answer_tokens(waiting)
    blocks = waiting.num_choices * -(-(waiting.prompt_tokens + int(answer)) // block_size)
    return waiting.prompt_tokens + blocks * answer_s(view, waiting)
