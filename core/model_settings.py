"""One `[[models]]` of a cluster that serves several."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from core.config_section import Section

MAX_MODELS = 16
MAX_ALIASES = 32
Dtype = Literal["bfloat16", "float32"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class ModelSettings(Section):
    """What a model has of its own. None: as the cluster's setting of the same name says."""

    # A GGUF file, a Hugging Face directory, a hub id, or the default model's name.
    model: str
    # The name in the API. None: derived from `model`.
    served_name: _Name | None = None
    # Further names. An answer tells the model's own.
    aliases: Annotated[tuple[_Name, ...], Field(strict=False, max_length=MAX_ALIASES)] = ()
    prefill_workers: int | None = Field(None, ge=0, le=64)
    decode_workers: int | None = Field(None, ge=1, le=64)
    max_queued: int | None = Field(None, ge=1)
    max_running: int | None = Field(None, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=1)
    default_max_tokens: int | None = Field(None, ge=1)
    tool_parser: ToolParser | None = None
    max_model_len: int | None = Field(None, ge=1)
    dtype: Dtype | None = None
    kv_cache_dtype: KvCacheDtype | None = None
    prefill_kv_bytes: int | None = Field(None, ge=1)
    decode_kv_bytes: int | None = Field(None, ge=1)
    prefill_tensor_parallel: int | None = Field(None, ge=1, le=16)
    decode_tensor_parallel: int | None = Field(None, ge=1, le=16)

    def given(self, *names: str) -> dict[str, object]:
        """Those of these settings that the model has of its own."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def twice(names: Iterable[str]) -> str | None:
    """The first name that stands there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
