"""Bodies of the HTTP API, strictly typed, and what is wrong with one in our own words.

Types alone are checked here, without conversions: "0.7" and true are no numbers and 1.5 is no
integer. Ranges are checked in `gateway.validation`, for HTTP and gRPC alike. pydantic's errors are
told in words that never quote what the client sent.
"""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from core.errors import InvalidRequest
from gateway.json_body import join_path


class StrictBody(BaseModel):
    """An object of a body. Absent and null mean the same everywhere."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def served(cls) -> frozenset[str]:
        """The names of the fields that are honoured."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


B = TypeVar("B", bound=StrictBody)

_WORDS = {
    "missing": "is required",
    "string_type": "must be a string",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "literal_error": "is not a value that this field takes",
    "union_tag_not_found": "must be a string or a list",
    "text_or_object": "must be a string or an object",
}


def validate(kind: type[B], values: dict[str, object]) -> B:
    """A body of this kind. Raises InvalidRequest with the path of the first field that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise InvalidRequest(
            _WORDS.get(first["type"], "has the wrong type"), field=_path(first)
        ) from None


def _path(error: ErrorDetails) -> str:
    """A union's branch, which begins with "@", is no part of the path."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, int) or not part.startswith("@"):
            path = join_path(path, part)
    return path
