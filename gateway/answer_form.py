"""The form of an answer: what it must be, and the calls of tools that may be in it."""

from core.errors import ConfigError, InvalidRequest, Unsupported
from core.messages import Grammar
from gateway.control_tokens import ControlTokens
from gateway.grammar_check import GrammarCheck
from gateway.inputs import ChatInput, CompletionInput, GrammarInput, Tool
from gateway.template import ChatTemplate
from gateway.tools.call_grammar import CallGrammar
from gateway.tools.dialect import choose
from gateway.tools.parser import ToolParser
from gateway.tools.reading import CallReading


class AnswerForm:
    """What one model's answers can be held to.

    `tool_parser` is the operator's word (`gateway.tool_parser`). Raises ConfigError where the
    template cannot tell a model of tools in that way.
    """

    def __init__(
        self, tool_parser: str, template: ChatTemplate, controls: ControlTokens, check: GrammarCheck
    ) -> None:
        dialect = choose(tool_parser, template.source)
        if tool_parser == "auto" and not template.takes_tools:
            dialect = None
        if dialect is not None and not (template.takes_tools or dialect.name == "hermes"):
            raise ConfigError(
                f"gateway.tool_parser: the model's chat template knows no tools, so that only "
                f"hermes is possible, not {dialect.name}"
            )
        self._dialect = dialect
        self._check = check
        self._takes_tools = template.takes_tools
        self._calls = CallGrammar(dialect, controls.id_of) if dialect is not None else None
        # Control tokens that a parser of calls must see, with their text.
        self._shown = {
            token_id: marker
            for marker in (dialect.markers if dialect is not None else ())
            if (token_id := controls.id_of(marker)) is not None
        }

    def check(self, request: ChatInput | CompletionInput) -> None:
        """What contradicts itself, or cannot be served. Raises InvalidRequest naming the field."""
        if request.grammar is not None and request.sampling.ignore_eos:
            raise InvalidRequest(
                f"cannot be combined with {request.grammar.field}", field="ignore_eos"
            )
        if not isinstance(request, ChatInput) or not request.tools.offered:
            return
        if self._dialect is None:
            why = (
                "how this model writes calls of tools is not known here"
                if self._takes_tools
                else "this model's chat template has no place for tools"
            )
            raise Unsupported(f"{why}; the operator can set gateway.tool_parser", field="tools")
        if request.tools.choice == "required":
            if request.grammar is not None:
                raise InvalidRequest(
                    f"cannot be combined with {request.grammar.field}", field="tool_choice"
                )
            if request.sampling.ignore_eos:
                raise InvalidRequest("cannot be combined with tool_choice", field="ignore_eos")

    async def grammar(self, request: ChatInput | CompletionInput) -> Grammar | None:
        """What the answer is held to, checked. Raises InvalidRequest naming the field."""
        if request.grammar is not None:
            await self._check.check(request.grammar)
        tools = request.tools.offered if isinstance(request, ChatInput) else ()
        if not isinstance(request, ChatInput) or self._calls is None or not tools:
            return request.grammar.grammar if request.grammar is not None else None
        forced = request.tools.choice == "required"
        if not forced and request.grammar is None and not any(tool.strict for tool in tools):
            return None
        made = await self._check.make("tools", lambda: self._of_calls(request, tools))
        await self._check.check(GrammarInput(grammar=made, field="tools"))
        return made

    def readings(self, request: ChatInput) -> list[CallReading]:
        """What reads calls from each choice of the answer; none where no tools were offered."""
        tools = request.tools
        if self._dialect is None or not tools.offered:
            return []
        reader, new_id = self._dialect.reader, self._dialect.new_id
        names = [tool.name for tool in tools.offered]
        most = None if tools.parallel else 1
        return [
            CallReading(ToolParser(reader, names, max_calls=most), new_id)
            for _ in range(request.sampling.n or 1)
        ]

    def shown(self, request: ChatInput | CompletionInput) -> dict[int, str]:
        """Control tokens that are text to whoever reads this answer."""
        offered = isinstance(request, ChatInput) and request.tools.offered
        return self._shown if offered else {}

    def close(self) -> None:
        """Begins no check any more."""
        self._check.close()

    def _of_calls(self, request: ChatInput, tools: tuple[Tool, ...]) -> Grammar:
        """Runs on a thread."""
        assert self._calls is not None
        asked, parallel = request.tools, request.tools.parallel
        forced = asked.choice == "required"
        self._calls.check(request.tools.tools, held=lambda tool: forced or tool.strict)
        if forced:
            wanted = tuple(tool for tool in tools if asked.named in (None, tool.name))
            return self._calls.forced(wanted, parallel=parallel and asked.named is None)
        if request.grammar is not None:
            return self._calls.or_answer(tools, request.grammar, parallel=parallel)
        return self._calls.free(tools, parallel=parallel)
