"""The JSON that chat and completion requests are answered with, whole and in chunks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from core.messages import StopReason, TokenLogprobs
from gateway.choice_text import TextEvent
from gateway.echo import Echo
from gateway.loaded_model import ModelInfo
from gateway.openai_calls import call_deltas, call_message
from gateway.openai_logprobs import LegacyLogprobs, Spell, chat_logprobs, prompt_logprobs
from gateway.text_stream import DoneEvent, Usage
from gateway.tools.reading import CallReading

FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.STOP_SEQUENCE: "stop",
    StopReason.LENGTH: "length",
}


class Answer(Protocol):
    """How one kind of request is answered."""

    def whole(self, events: Sequence[TextEvent], done: DoneEvent) -> dict[str, Any]: ...

    def first(self) -> list[dict[str, Any]]:
        """Chunks that go before the first text."""
        ...

    def chunks(self, event: TextEvent) -> list[dict[str, Any]]:
        """What an event brought, and the finish reason where it ended its choice."""
        ...

    def last(self, done: DoneEvent) -> list[dict[str, Any]]:
        """The chunk with usage and timing, where one of them was asked for."""
        ...


class _Shape:
    """The fields that stand in every answer and chunk of one request."""

    def __init__(
        self,
        request_id: str,
        model: ModelInfo,
        *,
        spell: Spell,
        include_usage: bool = False,
        include_timing: bool = False,
        num_choices: int = 1,
        created_unix_s: int | None = None,
        scored: tuple[int, ...] = (),
    ) -> None:
        """`scored` are the prompt's tokens, where their log probabilities are told."""
        self._head = {
            "id": request_id,
            "created": int(time.time()) if created_unix_s is None else created_unix_s,
            "model": model.id,
            "system_fingerprint": f"fp_{model.revision[:16]}",
        }
        self._spell = spell
        self._include_usage = include_usage
        self._include_timing = include_timing
        self._num_choices = num_choices
        self._scored = scored

    def _whole(
        self, kind: str, choices: Sequence[Mapping[str, Any]], done: DoneEvent
    ) -> dict[str, Any]:
        numbered = [{"index": i, **choice} for i, choice in enumerate(choices)]
        return {**self._head, "object": kind, "choices": numbered, **self._account(done)}

    def _account(self, done: DoneEvent) -> dict[str, Any]:
        account: dict[str, Any] = {"usage": usage_json(done.usage)}
        return account | {"timing": asdict(done.timing)} if self._include_timing else account

    def _prompt(self, events: Sequence[TextEvent]) -> dict[str, Any]:
        """What is told of the prompt beside an answer; nothing where nobody asked."""
        if not self._scored:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._scored, _of_prompt(events), self._spell)}

    def _by_choice(self, events: Sequence[TextEvent]) -> list[list[TextEvent]]:
        found: list[list[TextEvent]] = [[] for _ in range(self._num_choices)]
        for event in events:
            found[event.choice].append(event)
        return found

    def _chunk(
        self,
        kind: str,
        index: int,
        choice: Mapping[str, Any],
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        choices = [{"index": index, **choice, "logprobs": logprobs, "finish_reason": finish}]
        chunk = {**self._head, "object": kind, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _last(self, kind: str, done: DoneEvent) -> list[dict[str, Any]]:
        if not (self._include_usage or self._include_timing):
            return []
        return [{**self._head, "object": kind, "choices": [], **self._account(done)}]


class ChatAnswer(_Shape):
    """`chat.completion` and its chunks. With `readings`, one a choice, calls are read from them."""

    def __init__(
        self,
        request_id: str,
        model: ModelInfo,
        *,
        readings: Sequence[CallReading] = (),
        **more: Any,
    ) -> None:
        super().__init__(request_id, model, **more)
        self._readings = readings

    def whole(self, events: Sequence[TextEvent], done: DoneEvent) -> dict[str, Any]:
        choices = []
        for i, mine in enumerate(self._by_choice(events)):
            text = "".join(event.text for event in mine)
            said = call_message(self._readings[i], text) if self._readings else {"content": text}
            choices.append(
                {
                    "message": {"role": "assistant", "refusal": None, **said},
                    "logprobs": chat_logprobs(mine, self._spell),
                    "finish_reason": self._finish_reason(i, mine),
                }
            )
        return self._whole("chat.completion", choices, done) | self._prompt(events)

    def first(self) -> list[dict[str, Any]]:
        return [
            self._delta(choice, {"role": "assistant", "content": ""})
            for choice in range(self._num_choices)
        ]

    def chunks(self, event: TextEvent) -> list[dict[str, Any]]:
        chunks = []
        logprobs = chat_logprobs((event,), self._spell) if event.logprobs else None
        for delta in self._deltas(event):
            chunks.append(self._delta(event.choice, delta, logprobs=logprobs))
            logprobs = None  # they are told once
        if event.end is not None:
            finish = self._finish_reason(event.choice, (event,))
            chunks.append(self._delta(event.choice, {}, finish=finish))
        return chunks

    def last(self, done: DoneEvent) -> list[dict[str, Any]]:
        return self._last("chat.completion.chunk", done)

    def _deltas(self, event: TextEvent) -> list[dict[str, Any]]:
        """What an event adds; with log probabilities always something, that they can go along."""
        if not self._readings:
            return [{"content": event.text}] if event.text or event.logprobs else []
        reading, last = self._readings[event.choice], event.end is not None
        found = call_deltas(reading, event.text, last=last)
        return found or ([{"content": ""}] if event.logprobs else [])

    def _finish_reason(self, choice: int, events: Sequence[TextEvent]) -> str:
        reason = finish_reason(events)
        called = bool(self._readings) and self._readings[choice].called
        return "tool_calls" if called and reason == "stop" else reason

    def _delta(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self._chunk("chat.completion.chunk", index, {"delta": delta}, **more)


class CompletionAnswer(_Shape):
    """`text_completion` and its chunks, of the same name. `echo` goes before each answer."""

    def __init__(
        self, request_id: str, model: ModelInfo, *, echo: Echo | None = None, **more: Any
    ) -> None:
        super().__init__(request_id, model, **more)
        self._echo = echo or Echo(text="")
        self._told = False  # whether the prompt's log probabilities have gone out

    def whole(self, events: Sequence[TextEvent], done: DoneEvent) -> dict[str, Any]:
        told, beside = _of_prompt(events), self._prompt(events)
        choices = []
        for mine in self._by_choice(events):
            logprobs = LegacyLogprobs(self._spell)
            logprobs.add_prompt(self._echo, told)
            for event in mine:
                logprobs.add(event, behind=len(self._echo.text))
            choices.append(
                {
                    "text": self._echo.text + "".join(event.text for event in mine),
                    "logprobs": logprobs.found,
                    "finish_reason": finish_reason(mine),
                    **beside,
                }
            )
        return self._whole("text_completion", choices, done)

    def first(self) -> list[dict[str, Any]]:
        return [] if self._echo.token_ids else self._echoes(())

    def chunks(self, event: TextEvent) -> list[dict[str, Any]]:
        chunks = []
        if self._echo.token_ids and not self._told:
            self._told = True  # before the first text, since they come with it
            chunks += self._echoes(event.prompt_logprobs)
        if event.text or event.logprobs:
            logprobs = LegacyLogprobs(self._spell)
            logprobs.add(event, behind=len(self._echo.text))
            chunks.append(self._text(event.choice, event.text, logprobs=logprobs.found))
        if event.end is not None:
            chunks.append(self._text(event.choice, "", finish=finish_reason((event,))))
        return chunks

    def last(self, done: DoneEvent) -> list[dict[str, Any]]:
        return self._last("text_completion", done)

    def _echoes(self, told: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The prompt before each answer."""
        if not self._echo.text and not self._echo.token_ids:
            return []
        logprobs = LegacyLogprobs(self._spell)
        logprobs.add_prompt(self._echo, told)
        return [
            self._text(choice, self._echo.text, logprobs=logprobs.found)
            for choice in range(self._num_choices)
        ]

    def _text(self, index: int, text: str, **more: Any) -> dict[str, Any]:
        return self._chunk("text_completion", index, {"text": text}, **more)


def _of_prompt(events: Sequence[TextEvent]) -> Sequence[TokenLogprobs]:
    """What the first event brought of the prompt's tokens."""
    return next((event.prompt_logprobs for event in events if event.prompt_logprobs), ())


def finish_reason(events: Sequence[TextEvent]) -> str:
    """OpenAI's word for the end of a choice, from its events."""
    end = events[-1].end
    assert end is not None
    return FINISH_REASONS[end.stop_reason]


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's names; cached tokens are part of the prompt's."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_json(model: ModelInfo, name: str) -> dict[str, Any]:
    """One entry of /v1/models: a model by one of its names. An alias says what it stands for."""
    return {
        "id": name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "tandem",
        "context_window": model.context_window,
        "alias_of": None if name == model.id else model.id,
    }
