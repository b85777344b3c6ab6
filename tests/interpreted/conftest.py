"""Triton's interpreter, made faster: it prepares `tl` where a kernel is launched, not at each call in it.

And it rounds to bfloat16, as a GPU does, where Triton's truncates.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_prepare: Callable[[FunctionType], Any] = interpreter._patch_lang
_patch_tensor: Callable[..., None] = interpreter._patch_lang_tensor
_convert_float: Callable[..., Any] = interpreter._convert_float


_of_scalar: Callable[[Any], Any] = cache(interpreter._get_np_dtype)


def _numpy(dtype: Any) -> Any:
    """Look up NumPy's dtype for a scalar or a block; for each, Triton makes a table of all."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _of_scalar(dtype.scalar)


@cache
def _languages(function: FunctionType) -> list[ModuleType]:
    return [module for module in (tl, tl.core) if any(each is module for each in function.__globals__.values())]


def _prepare_once(function: FunctionType) -> Any:
    """Do nothing if the operations of all these modules have been replaced already."""
    languages = _languages(function)
    if languages and not any(tl.core.is_builtin(module.load) for module in languages):
        return SimpleNamespace(restore=lambda: None)
    return _prepare(function)


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Round float32 to bfloat16, ties to even; read denormal numbers of bfloat16."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << 16
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_float(data, source, target, rounding)
    raw = data.view(np.uint32)
    rounded = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.where(np.isnan(data), 0x7FFF, rounded).astype(np.uint16)


def _patched_tensor(tensor: Any, *scope: Any) -> None:
    """Let a kernel loop over numbers of its own; before 3.7, Triton reads them as NumPy 2.4 no longer does."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._convert_float = _convert
interpreter._get_np_dtype = _numpy
interpreter._patch_lang = _prepare_once
interpreter._patch_lang_tensor = _patched_tensor
