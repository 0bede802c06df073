"""Which fields of the OpenAI API are served, refused, or taken because they change nothing.

A documented field is either honoured or refused, never ignored. Some values of a field that is not
served ask for what happens anyway (`suffix: ""`, no tools): they pass. Labels that
OpenAI keeps for the caller's own books (`user`, `metadata`) ask for nothing and pass as well.

Fields that nobody documents are dropped and named to the client, or refused in strict mode. So are
the controls of other servers' internals; a request can never bring its own chat template.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest, Unsupported
from gateway.json_body import join_path

_MAX_NAMED = 16
_TYPE_NAMES = {str: "string", dict: "object", bool: "boolean", int: "integer", list: "array"}


@dataclass(frozen=True, slots=True)
class Passes:
    """Which values of a field pass, beside null: these, or all of these types.

    Types count: True is not 1.
    """

    values: tuple[Any, ...] = ()
    kinds: tuple[type, ...] = ()

    def __call__(self, value: Any) -> bool:
        return (
            value is None
            or type(value) in self.kinds
            or any(type(value) is type(v) and value == v for v in self.values)
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The same in JSON Schema's words."""
        if self.kinds:
            return {"type": [*(_TYPE_NAMES[kind] for kind in self.kinds), "null"]}
        return {"enum": [*self.values, None]}


def _only(*values: Any) -> Passes:
    return Passes(values=values)


def _kind(*kinds: type) -> Passes:
    return Passes(kinds=kinds)


_NOTHING = _only()
_LABEL = _kind(str)

_COMMON: dict[str, Passes] = {
    "user": _LABEL,
    "metadata": _kind(dict),
    "store": _only(False),
    "service_tier": _only("auto", "default"),
    "safety_identifier": _LABEL,
    "prompt_cache_key": _LABEL,
    "prompt_cache_retention": _NOTHING,
    # Extensions of other servers that would change the answer.
    "chat_template": _NOTHING,
    "chat_template_kwargs": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "use_beam_search": _only(False),
}

UNSUPPORTED_CHAT: dict[str, Passes] = _COMMON | {
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "modalities": _only(["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "reasoning_effort": _NOTHING,
    "verbosity": _only("medium"),
    "documents": _only([]),
    "add_generation_prompt": _only(True),
    "continue_final_message": _only(False),
}

UNSUPPORTED_COMPLETION: dict[str, Passes] = _COMMON | {
    "suffix": _only(""),
}

UNSUPPORTED_MESSAGE: dict[str, Passes] = {
    "function_call": _NOTHING,
    "refusal": _NOTHING,
    "audio": _NOTHING,
}

UNSUPPORTED_STREAM_OPTIONS: dict[str, Passes] = {
    "include_obfuscation": _only(False),
    "continuous_usage_stats": _only(False),
}

PART_FIELDS = frozenset({"type", "text"})
# Those of OpenAI and its kin. No other is named to the client, since it might be its text.
_KNOWN_PARTS = frozenset(
    {"image_url", "input_audio", "audio_url", "video_url", "file", "refusal", "input_image"}
)


def sift(
    value: dict[str, Any], served: frozenset[str], table: dict[str, Passes], path: str = ""
) -> Iterator[str]:
    """Takes what is not served out of an object, in place, and gives the unknown fields' paths.

    Raises Unsupported for a value of the table's fields that does not pass.
    """
    for name in [name for name in value if name not in served]:
        where = join_path(path, name)
        if name not in table:
            yield where
        elif not table[name](value[name]):
            raise Unsupported("is not supported by this server with this value", field=where)
        del value[name]


def tell_ignored(paths: list[str], *, strict: bool) -> str | None:
    """The header that names dropped fields, or None. Raises InvalidRequest in strict mode."""
    if not paths:
        return None
    if strict:
        raise InvalidRequest("is not a field of this API", field=paths[0])
    unique = list(dict.fromkeys(paths))
    more = [f"+{len(unique) - _MAX_NAMED}"] if len(unique) > _MAX_NAMED else []
    return ", ".join([*unique[:_MAX_NAMED], *more])


def refuse_part(part: dict[str, Any], path: str) -> None:
    """A content part that is no text. Nothing is fetched, whatever it points to."""
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        named = f"of type {kind}" if kind in _KNOWN_PARTS else "of another type"
        raise Unsupported(
            f"content parts {named} are not supported, only text", field=join_path(path, "type")
        )
