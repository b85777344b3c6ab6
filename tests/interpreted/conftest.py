"""Triton's interpreter, twice as fast: it prepares `tl` where a kernel is launched, not at each call in it.

And it works out a type of NumPy's, the shape and name of a block's type, and the shape of a tensor once for each
kind, not each time. Tensors of one shape share it, so two of them need no broadcasting.

And it rounds to bfloat16, as a GPU does, where Triton's truncates.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_prepare: Callable[[FunctionType], Any] = interpreter._patch_lang
_patch_tensor: Callable[..., None] = interpreter._patch_lang_tensor
_numpy: Callable[[Any], Any] = interpreter._get_np_dtype
_block: Callable[..., None] = tl.block_type.__init__
_tensor: Callable[..., None] = tl.tensor.__init__
_convert_float: Callable[..., Any] = interpreter._convert_float
_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
_dtypes: dict[tuple[type, str], Any] = {}
_blocks: dict[tuple[str, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], dict[str, Any]] = {}
_shaped: dict[str, dict[str, Any]] = {}  # by the name of a type, which has its shape


@cache
def _languages(function: FunctionType) -> tuple[ModuleType, ...]:
    known = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
    return tuple(module for module in known if module in (tl, tl.core))


def _prepare_once(function: FunctionType) -> Any:
    """Do nothing if the operations of all these modules have been replaced already."""
    languages = _languages(function)
    if languages and not any(tl.core.is_builtin(module.load) for module in languages):
        return SimpleNamespace(restore=lambda: None)
    return _prepare(function)


def _numpy_once(dtype: Any) -> Any:
    """Return NumPy's dtype for one of Triton's, which depends on the type of an element alone."""
    scalar = dtype.scalar
    key = (type(scalar), str(scalar))
    if key not in _dtypes:
        _dtypes[key] = _numpy(scalar)
    return _dtypes[key]


def _block_once(self: Any, element_ty: Any, shape: Any) -> None:
    """Make the type of a block; all but the element's type itself is that of the last one with the same names."""
    key = (str(element_ty), *[str(getattr(size, "value", size)) for size in shape])
    if key in _blocks:
        vars(self).update(_blocks[key], element_ty=element_ty)
    else:
        _block(self, element_ty, shape)
        _blocks[key] = dict(vars(self))


def _tensor_once(self: Any, handle: Any, type: Any) -> None:
    """Make a tensor; its shape is that of the last one with a type of the same name."""
    if type.name in _shaped:
        vars(self).update(_shaped[type.name], handle=handle, type=type, dtype=type.scalar)
    else:
        _tensor(self, handle, type)
        shape = tuple(size.value for size in self.shape)
        _shaped[type.name] = _shapes.setdefault(shape, {"shape": self.shape, "numel": self.numel})
        vars(self).update(_shaped[type.name])


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Round float32 to bfloat16, ties to even; read denormal numbers of bfloat16."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << 16
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_float(data, source, target, rounding)
    raw = data.view(np.uint32)
    rounded = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
    return np.where(np.isnan(data), 0x7FFF, rounded).astype(np.uint16)


def _broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


def _patched_tensor(tensor: Any, *scope: Any) -> None:
    """Let a kernel loop over numbers of its own; before 3.7, Triton reads them as NumPy 2.4 no longer does."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._convert_float = _convert
interpreter._patch_lang = _prepare_once
interpreter._patch_lang_tensor = _patched_tensor
interpreter._get_np_dtype = _numpy_once
tl.block_type.__init__ = _block_once
tl.tensor.__init__ = _tensor_once
TritonSemantic.broadcast_impl_value = _broadcast_once
