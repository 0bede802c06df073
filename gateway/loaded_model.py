"""What the gateway has of one model: tokenizer, template, limits, the form of its answers."""

from collections.abc import Callable
from dataclasses import dataclass

from core.config import ClusterConfig
from core.model_card import ModelCard
from gateway.answer_form import AnswerForm
from gateway.choice_text import ChoiceText
from gateway.detokenizer import Detokenizer
from gateway.echo import Echo, echo_of
from gateway.grammar_check import GrammarCheck
from gateway.inputs import ChatInput, CompletionInput
from gateway.preparation import Preparation
from gateway.request_metrics import RequestMetrics, unread_metrics
from gateway.stop_strings import StopStrings
from gateway.template import ChatTemplate
from gateway.tokenizer import PromptTokenizer
from gateway.validation import Limits, check_chat, check_completion


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model as the API lists it."""

    id: str
    # Further names that it is asked for by.
    aliases: tuple[str, ...] = ()
    created_unix_s: int
    context_window: int
    # Changes when the weights do.
    revision: str

    @property
    def names(self) -> tuple[str, ...]:
        """Its own, then the others."""
        return (self.id, *self.aliases)


class LoadedModel:
    """Loaded once, at the gateway's start. Its threads are made as they are needed.

    `config` is what a cluster of this model alone would be told. Raises ConfigError where the
    tokenizer or the template cannot be used. A `tokenizer` of the card that exists already spares
    the second to make one.
    """

    def __init__(
        self,
        card: ModelCard,
        name: str,
        config: ClusterConfig,
        *,
        aliases: tuple[str, ...] = (),
        tokenizer: PromptTokenizer | None = None,
        grammars: GrammarCheck | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        gateway = config.gateway
        window = min(card.context_window, config.engine.max_model_len or card.context_window)
        self.info = ModelInfo(
            id=name,
            aliases=aliases,
            created_unix_s=int(card.tokenizer_path.stat().st_mtime),
            context_window=window,
            revision=card.revision,
        )
        self.limits = Limits(
            served_name=name,
            window=window,
            vocab_size=card.vocab_size,
            max_stop_strings=gateway.max_stop_strings,
            max_stop_chars=gateway.max_stop_chars,
            max_choices=gateway.max_choices,
            max_logprobs=gateway.max_logprobs,
            max_logit_bias=gateway.max_logit_bias,
            max_prompt_logprobs=gateway.max_prompt_logprobs,
            max_prompt_tokens=gateway.max_prompt_tokens,
            default_max_tokens=gateway.default_max_tokens,
        )
        self.tokenizer = tokenizer or PromptTokenizer(card)
        template = ChatTemplate(card, self.tokenizer.controls, window=window)
        self.preparation = Preparation(self.tokenizer, template, self.limits)
        self.form = AnswerForm(
            gateway.tool_parser,
            template,
            self.tokenizer.controls,
            grammars or GrammarCheck(max_bytes=gateway.max_grammar_bytes),
        )
        self.metrics = metrics or unread_metrics(name, config.telemetry)

    def check(self, request: ChatInput | CompletionInput) -> None:
        """Everything that can be known of a request for it before its prompt is made."""
        if isinstance(request, ChatInput):
            check_chat(request, self.limits)
        else:
            check_completion(request, self.limits)
        self.form.check(request)

    def token_names(self, token_ids: tuple[int, ...]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        return [self.tokenizer.name(token_id) for token_id in token_ids]

    @property
    def token_text(self) -> Callable[[int], tuple[str, bytes | None]]:
        """Gives a token by itself: as text, and its bytes; a control token has its name alone."""
        return self.tokenizer.spelled

    def echo(self, request: CompletionInput, token_ids: tuple[int, ...]) -> Echo:
        """A completion's prompt as text, without control tokens, to go before its answers."""
        prompt = request.prompt
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        if request.sampling.logprobs is None:
            return Echo(text=text)
        return echo_of(text, token_ids, Detokenizer(self.tokenizer).feed)

    def choices(
        self, request: ChatInput | CompletionInput, *, num_choices: int, min_tokens: int
    ) -> list[ChoiceText]:
        """What makes text of each answer's tokens."""
        shown = self.form.shown(request)
        return [
            ChoiceText(
                choice,
                Detokenizer(self.tokenizer, shown),
                StopStrings(request.sampling.stop),
                min_tokens=min_tokens,
            )
            for choice in range(num_choices)
        ]

    def close(self) -> None:
        """Lets the threads go."""
        self.preparation.close()
        self.form.close()
