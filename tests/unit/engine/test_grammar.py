"""Grammars in the step loop: compiled beside it, replayed from tokens, and no stall of others."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from core.errors import Internal, InvalidRequest, TandemError
from core.grammar import schema_text
from core.messages import Grammar, GrammarKind, SamplingParams, StopReason, TokenBias, TransferId
from core.model_card import ModelCard
from engine.batching import StepBudget
from engine.block_manager import BlockManager
from engine.branching import branch
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.grammar import GrammarCompiler, Masks, Matcher
from engine.prepare import prepare
from engine.sampler import sample
from engine.sequence import Sequence, SequenceKey
from engine.step_batch import FailedRow, SampledToken, SampleRequest, StepBatch, StepResult
from gateway.tokenizer import PromptTokenizer

BLOCK_SIZE = 4
DEADLINE_S = 20.0
WORDS = Grammar(kind=GrammarKind.REGEX, text="[a-c]{4}( [a-c]{4}){5}")
RECORD = Grammar(
    kind=GrammarKind.JSON_SCHEMA,
    text=schema_text(
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return prepare("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(card: ModelCard) -> PromptTokenizer:
    return PromptTokenizer(card)


@pytest.fixture
def compiler(card: ModelCard) -> Any:
    compiler = GrammarCompiler(card, timeout_s=10.0)
    yield compiler
    compiler.close()


async def compiled(
    compiler: GrammarCompiler, grammar: Grammar, answer: tuple[int, ...] = ()
) -> Matcher | TandemError:
    told: asyncio.Future[Matcher | TandemError] = asyncio.get_running_loop().create_future()
    compiler.begin(grammar, answer, told.set_result)
    async with asyncio.timeout(DEADLINE_S):
        return await told


def allowed(matcher: Matcher, tokenizer: PromptTokenizer) -> set[str]:
    mask = matcher.mask(DEADLINE_S)
    assert mask is not None
    ids = (~mask).nonzero().flatten().tolist()
    return {tokenizer.decode([each]) or tokenizer.name(each) for each in ids}


class RandomModel:
    """Logits that depend on the position alone; samples as the real runner does."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.batches: list[StepBatch] = []
        self.on_masks: Callable[[Masks], None] = lambda masks: None

    def execute(self, batch: StepBatch, on_layer: object = None) -> StepResult:
        self.batches.append(batch)
        items = [item for item in batch.items if item.sample is not None]
        requests = [item.sample for item in items]
        masks = Masks(requests)
        self.on_masks(masks)
        rows = masks.collect()
        taken = [requests[i] for i in rows]
        noise = [torch.Generator().manual_seed(each.position) for each in taken]
        logits = [torch.randn(self._vocab_size, generator=each) for each in noise]
        ids = sample(torch.stack(logits), taken, masks.forbidden(rows)) if rows else []
        sampled = [
            SampledToken(key=items[i].key, token_id=t) for i, t in zip(rows, ids, strict=True)
        ]
        failed = [FailedRow(key=items[i].key, error=e) for i, e in masks.failures.items()]
        return (*sampled, *failed)


class Desk:
    """An engine, and what it tells."""

    def __init__(
        self, model: RandomModel, compiler: GrammarCompiler, card: ModelCard, num_blocks: int
    ) -> None:
        self.model = model
        self.events: list[SequenceEvent] = []
        self.errors: dict[SequenceKey, Exception] = {}
        self.blocks = BlockManager(num_blocks)
        self.compute = ComputeThread(threads=1)
        self._changed = asyncio.Event()
        self.engine = Engine(
            runner=model,
            compute=self.compute,
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            budget=StepBudget(max_tokens=64, max_seqs=16),
            grammars=compiler,
            eos_token_ids=card.eos_token_ids,
            on_step=self._stepped,
            on_error=self._failed,
        )

    def _stepped(self, events: tuple[SequenceEvent, ...]) -> None:
        self.events += events
        self._changed.set()

    def _failed(self, keys: tuple[SequenceKey, ...], error: Exception) -> None:
        self.errors |= dict.fromkeys(keys, error)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def end_of(self, sequence: Sequence) -> StopReason | None:
        reasons = [e.stop_reason for e in self.events if e.key == sequence.key and e.stop_reason]
        return reasons[0] if reasons else None

    def tokens_of(self, sequence: Sequence) -> int:
        return sum(1 for e in self.events if e.key == sequence.key and e.token_id is not None)

    def sequence(
        self, name: str, grammar: Grammar | None, answer: tuple[int, ...] = (), **sampling: Any
    ) -> Sequence:
        token_ids = [9, 9, 9, *answer]
        values = {"temperature": 1.0, "max_new_tokens": 60, "seed": 7} | sampling
        return Sequence(
            key=SequenceKey(TransferId(request_id=name, attempt=0)),
            token_ids=token_ids,
            num_prompt_tokens=3,
            lease=self.blocks.acquire(-(-(len(token_ids) + 1) // BLOCK_SIZE)),
            sampling=SamplingParams(grammar=grammar, **values),
        )


@asynccontextmanager
async def running(
    compiler: GrammarCompiler, card: ModelCard, num_blocks: int = 256
) -> AsyncIterator[Desk]:
    desk = Desk(RandomModel(card.vocab_size), compiler, card, num_blocks)
    loop = asyncio.create_task(desk.engine.run())
    try:
        yield desk
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        assert await desk.compute.close(timeout_s=DEADLINE_S)


async def test_only_what_the_grammar_allows_may_come_and_the_end_only_at_its_end(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer
) -> None:
    matcher = await compiled(compiler, RECORD)
    assert isinstance(matcher, Matcher)
    assert allowed(matcher, tokenizer) == {"{", '{"'}
    matcher.begin(tokenizer.encode_plain('{"ok": true'))
    assert "}" in allowed(matcher, tokenizer) and "<|im_end|>" not in allowed(matcher, tokenizer)
    matcher.begin(tokenizer.encode_plain("}"))
    assert allowed(matcher, tokenizer) == {"<|im_end|>", "<|endoftext|>"}


async def test_a_fresh_matcher_that_replays_an_answer_allows_the_same(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer
) -> None:
    answer = tokenizer.encode_plain('{"ok": tr')
    step_by_step = await compiled(compiler, RECORD)
    assert isinstance(step_by_step, Matcher)
    for i in range(len(answer)):
        step_by_step.begin(answer[i : i + 1])
        step_by_step.mask(DEADLINE_S)
        replayed = await compiled(compiler, RECORD, answer[: i + 1])
        assert isinstance(replayed, Matcher)
        assert replayed.num_consumed == step_by_step.num_consumed == i + 1
        assert allowed(replayed, tokenizer) == allowed(step_by_step, tokenizer)


@pytest.mark.parametrize(
    ("grammar", "kind", "says"),
    [
        (Grammar(kind=GrammarKind.REGEX, text="(?=a)b"), InvalidRequest, "look-around"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), InvalidRequest, "EOF"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"not":{}}'), InvalidRequest, "not"),
        (Grammar(kind=GrammarKind.LARK, text="start: start"), InvalidRequest, ""),
        (Grammar(kind=GrammarKind.UNSPECIFIED, text="x"), InvalidRequest, "kind"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"$ref":"#"}'), InvalidRequest, "no answer"),
        (Grammar(kind=GrammarKind.REGEX, text="[^\\s\\S]"), InvalidRequest, "no answer"),
    ],
)
async def test_a_grammar_that_cannot_be_held_is_an_error_of_its_own(
    compiler: GrammarCompiler, grammar: Grammar, kind: type[Exception], says: str
) -> None:
    error = await compiled(compiler, grammar)
    assert isinstance(error, kind) and says in str(error)


async def test_an_answer_that_is_not_of_its_grammar_is_told_as_a_fault_of_ours(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer
) -> None:
    error = await compiled(compiler, RECORD, tokenizer.encode_plain("Sure! {"))
    assert isinstance(error, Internal)


async def test_a_compilation_that_takes_too_long_is_given_up(card: ModelCard) -> None:
    compiler = GrammarCompiler(card, timeout_s=0.05)
    bomb = Grammar(kind=GrammarKind.REGEX, text="(a{1000}){1000}")
    error = await compiled(compiler, bomb)
    compiler.close()
    assert isinstance(error, InvalidRequest) and "too complex" in error.message


async def test_an_answer_follows_its_grammar_beside_one_that_has_none(
    compiler: GrammarCompiler, card: ModelCard, tokenizer: PromptTokenizer
) -> None:
    async with running(compiler, card) as desk:
        held, free = desk.sequence("held", WORDS), desk.sequence("free", None, max_new_tokens=20)
        desk.engine.add(held)
        desk.engine.add(free)
        await desk.until(lambda: None not in (desk.end_of(held), desk.end_of(free)))
    text = tokenizer.decode(held.token_ids[3:])
    assert desk.end_of(held) is StopReason.EOS
    assert all(set(word) <= set("abc") and len(word) == 4 for word in text.split(" "))
    assert len(text.split(" ")) == 6
    assert all(item.sample is None or (item.sample.matcher is None) == (item.key == free.key)
               for batch in desk.model.batches for item in batch.items)  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0.0},
        {"min_tokens": 50},
        {"logit_bias": (TokenBias(token_id=2, bias=100.0), TokenBias(token_id=300, bias=100.0))},
    ],
)
async def test_no_other_option_lets_an_answer_leave_its_grammar(
    compiler: GrammarCompiler, card: ModelCard, tokenizer: PromptTokenizer, more: dict[str, Any]
) -> None:
    async with running(compiler, card) as desk:
        held = desk.sequence("held", WORDS, **more)
        desk.engine.add(held)
        await desk.until(lambda: desk.end_of(held) is not None)
    words = tokenizer.decode(held.token_ids[3:]).split(" ")
    assert desk.end_of(held) is StopReason.EOS
    assert len(words) == 6 and all(len(word) == 4 for word in words)


async def test_an_answer_cut_anywhere_goes_on_elsewhere_with_the_same_tokens(
    compiler: GrammarCompiler, card: ModelCard
) -> None:
    async with running(compiler, card) as desk:
        whole = desk.sequence("whole", WORDS)
        desk.engine.add(whole)
        await desk.until(lambda: desk.end_of(whole) is not None)
        answer = tuple(whole.token_ids[3:])
        cuts = range(1, len(answer))
        again = [desk.sequence(f"cut{cut}", WORDS, answer[:cut]) for cut in cuts]
        for each in again:
            desk.engine.add(each)
        await desk.until(lambda: all(desk.end_of(each) for each in again))
    assert all(tuple(each.token_ids[3:]) == answer for each in again)


async def test_a_preempted_answer_goes_on_within_its_grammar(
    compiler: GrammarCompiler, card: ModelCard
) -> None:
    async with running(compiler, card) as desk:
        roomy = desk.sequence("roomy", WORDS)
        desk.engine.add(roomy)
        await desk.until(partial(desk.end_of, roomy))
    num_blocks = -(-len(roomy.token_ids) // BLOCK_SIZE) + 1
    async with running(compiler, card, num_blocks) as desk:
        most = len(roomy.token_ids) - 3
        asked = [desk.sequence(name, WORDS, max_new_tokens=most) for name in ("a", "b")]
        for each in asked:
            desk.engine.add(each)
        for each in asked:  # the first to come is the last to be preempted
            await desk.until(partial(desk.end_of, each))
            each.lease.release()
        assert desk.engine.preemptions > 0
    assert [each.token_ids for each in asked] == [roomy.token_ids] * 2


async def test_a_branch_has_a_matcher_of_its_own(
    compiler: GrammarCompiler, card: ModelCard, tokenizer: PromptTokenizer
) -> None:
    async with running(compiler, card) as desk:
        lead = desk.sequence("lead", WORDS)
        desk.engine.add(lead)
        await desk.until(lambda: desk.tokens_of(lead) >= 1)
        other = branch(lead, 1, (), BLOCK_SIZE)
        desk.engine.add(other)
        await desk.until(lambda: desk.end_of(other) is not None and desk.end_of(lead) is not None)
    assert other.matcher is not lead.matcher
    assert len(tokenizer.decode(other.token_ids[3:]).split(" ")) == 6


async def test_a_late_mask_makes_its_own_answer_wait_and_no_other(
    compiler: GrammarCompiler, card: ModelCard, tokenizer: PromptTokenizer
) -> None:
    async with running(compiler, card) as desk:
        held = desk.sequence("held", WORDS)
        free = desk.sequence("free", None, max_new_tokens=2000, ignore_eos=True)
        late, release = threading.Event(), threading.Event()
        desk.engine.add(held)
        await desk.until(lambda: desk.tokens_of(held) >= 1)
        assert held.matcher is not None
        advance = held.matcher._advance

        def slow(token_ids: tuple[int, ...]) -> torch.Tensor:
            late.set()
            assert release.wait(DEADLINE_S)
            return advance(token_ids)

        held.matcher._advance = slow  # type: ignore[method-assign]
        assert await asyncio.to_thread(late.wait, DEADLINE_S)
        desk.engine.add(free)
        before = desk.tokens_of(held)
        await desk.until(lambda: desk.tokens_of(free) >= 50)
        assert desk.tokens_of(held) <= before + 1  # one may have been on its way
        release.set()
        await desk.until(lambda: desk.end_of(held) is not None)
        await desk.engine.remove(free.key)
    assert len(tokenizer.decode(held.token_ids[3:]).split(" ")) == 6
    assert not desk.errors


async def test_an_answer_whose_grammar_fails_leaves_alone(
    compiler: GrammarCompiler, card: ModelCard
) -> None:
    async with running(compiler, card) as desk:
        bad = desk.sequence("bad", Grammar(kind=GrammarKind.REGEX, text="(?=a)b"))
        broken, fine = desk.sequence("broken", WORDS), desk.sequence("fine", WORDS)
        for each in (bad, broken, fine):
            desk.engine.add(each)
        await desk.until(lambda: desk.tokens_of(broken) >= 1)
        assert broken.matcher is not None

        def fail(token_ids: tuple[int, ...]) -> torch.Tensor:
            raise InvalidRequest("the grammar is too complex")

        broken.matcher._advance = fail  # type: ignore[method-assign]
        await desk.until(lambda: desk.end_of(fine) is not None and len(desk.errors) == 2)
    assert set(desk.errors) == {bad.key, broken.key}
    assert all(isinstance(error, InvalidRequest) for error in desk.errors.values())
    assert desk.end_of(fine) is StopReason.EOS


def test_rows_without_a_grammar_need_no_mask() -> None:
    requests = [SampleRequest(params=SamplingParams(), position=5)] * 3
    masks = Masks(requests)
    assert masks.collect() == [0, 1, 2]
    assert masks.forbidden([0, 1, 2]) is None
