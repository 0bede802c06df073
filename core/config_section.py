"""What every part of the configuration is: strict, frozen, and without words it does not know."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of an operator's file."""

    # Strict: `http_port = true` is a mistake, not port 1. JSON has no word for inf and nan.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
