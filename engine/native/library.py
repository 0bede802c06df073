"""The C functions of the native kernels, as ctypes sees them.

Every function comes once for bfloat16 and once for float32. ctypes lets go of the interpreter's
lock during a call. Pointers are plain numbers, as `Tensor.data_ptr` gives them; the caller keeps
what they point to, and has checked shapes and contiguity.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_P, _L, _I, _F = c_void_p, c_long, c_int, c_float
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

Function = Callable[..., None]


class Step(ctypes.Structure):
    """TandemStep of src/step.h."""

    _fields_ = (
        ("num_seqs", _L),
        ("max_blocks", _L),
        ("first_rows", ctypes.POINTER(c_int32)),
        ("starts", ctypes.POINTER(c_int32)),
        ("blocks", ctypes.POINTER(c_int32)),
    )


class Pool(ctypes.Structure):
    """TandemPool of src/step.h."""

    _fields_ = (
        ("base", _P),
        ("num_layers", _L),
        ("block_size", _L),
        ("kv_heads", _L),
        ("head_dim", _L),
        ("head_width", _L),
        ("fp8", _L),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The functions for one dtype. `src/` says what their arguments are."""

    dtype: torch.dtype
    pack: Function
    linear: Function
    linear_f32: Function  # the same with float32 results
    unpack_rows: Function
    norm: Function
    swiglu: Function
    rope_write: Function
    attend: Function


def load_library(path: Path, dtype: torch.dtype) -> Library:
    """The library at `path`. Raises OSError where it does not load."""
    library = ctypes.CDLL(str(path))
    suffix = _SUFFIXES[dtype]
    linear = (_P, _L, _P, _P, _P, _L, _L, _L, _L, _I)

    def function(name: str, *arguments: Any) -> Function:
        found = library[f"tandem_{name}"]
        found.argtypes = arguments
        found.restype = None
        return found

    return Library(
        dtype=dtype,
        pack=function(f"pack_{suffix}", _P, _L, _L, _P),
        linear=function(f"linear_{suffix}", *linear),
        linear_f32=function("linear_bf16_f32" if suffix == "bf16" else "linear_f32", *linear),
        unpack_rows=function(f"unpack_rows_{suffix}", _P, _P, _L, _L, _P),
        norm=function(f"norm_{suffix}", _P, _P, _P, _P, _L, _L, _F, _I),
        swiglu=function(f"swiglu_{suffix}", _P, _P, _L, _L, _I),
        rope_write=function(f"rope_write_{suffix}", _P, _P, _L, _P, _L, _P, _P, _P, _P, _F, _I),
        attend=function(f"attend_{suffix}", _P, _P, _L, _P, _L, _P, _L, _L, _F, _I),
    )
