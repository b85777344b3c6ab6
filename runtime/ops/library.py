"""What all ops share: a namespace, registries by key, gradients, and the definition of ops for PyTorch."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from ..kernels.triton_compat import HAS_TRITON
from ..torch_internals import compiles_ahead_of_time
from . import reference

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICES = () if not HAS_TRITON else ("cuda", "cpu") if INTERPRETED else ("cuda",)


def _namespace() -> str:
    """Return the namespace of the ops: what the package around this runtime says in `__ops__`, else its name."""
    home = sys.modules[__name__.removesuffix(".runtime.ops.library")]
    return str(getattr(home, "__ops__", home.__name__.replace(".", "_")))


NAMESPACE = _namespace()
ops: Any = getattr(torch.ops, NAMESPACE)
Forward = TypeVar("Forward", bound=Callable[..., Any])
# Before 2.12, programs compiled ahead of time read an operator's dtype by the numbers of exported programs, which
# are not PyTorch's own: float64 for float32, float32 for float16.
MISREADS_DTYPES = torch.__version__ < "2.12"
sources: list[Callable[[str], None]] = []  # called with an unknown key, to register what it names


class Registered(Protocol):
    """What is registered under a key; messages use its name."""

    @property
    def key(self) -> str:
        """Identifies it."""

    @property
    def name(self) -> str:
        """Its name in messages."""


Kind = TypeVar("Kind", bound=Registered)


class Registry(Generic[Kind]):
    """What generated modules have registered with some ops, by key.

    Attributes:
        kind: what it is, in messages.
        by_key: all of it.

    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.by_key: dict[str, Kind] = {}

    def register(self, one: Kind) -> str:
        """Register it with the ops and return its key; repeating this is harmless."""
        self.by_key[one.key] = one
        return one.key

    def find(self, key: str) -> Kind:
        """Return what a key names; a loaded program may use a key before its module is imported.

        Raises:
            RuntimeError: nothing is registered under it.

        """
        for source in sources if key not in self.by_key else ():
            source(key)
        try:
            return self.by_key[key]
        except KeyError:
            raise RuntimeError(
                f"no {self.kind} is registered under the key {key!r}: import the generated module it comes from"
            ) from None

    def refuse_second_derivative(self, ctx: Any, *_: Any) -> NoReturn:
        """Raise, as the backward of a gradient; `ctx` has the key."""
        refuse_second_derivative(self.find(ctx.key).name)


def refuse_second_derivative(name: str) -> NoReturn:
    """Raise a RuntimeError that calls the op by a name."""
    raise RuntimeError(
        f"{name}: a second derivative was requested, but only what the first needs is kept; "
        "use PyTorch's own operators where gradients are differentiated again"
    )


def check_dtype(name: str, x: Any, what: str = "a tensor") -> None:
    """Raise a TypeError that begins with a name unless x is a tensor of DTYPES."""
    dtype = getattr(x, "dtype", None)
    if dtype not in DTYPES:
        found = dtype or type(x).__name__
        raise TypeError(f"{name}: expected {what} of float16, bfloat16, float32 or float64, got {found}")


def with_signature(forward: Forward) -> Forward:
    """Cache the signature of a Function's forward, which PyTorch would otherwise compute at every call."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


class Gradients(torch.autograd.Function):
    """Gradients by an op, which cannot be differentiated again: otherwise second derivatives would be wrong."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(name: str, autograd_anchor: Tensor, op: str, *arguments: Any) -> Any:
        """Return what an op returns.

        Args:
            name: for the error that a second derivative raises.
            autograd_anchor: ties the gradients to the input.
            op: its name.
            arguments: of the op.

        """
        return getattr(ops, op)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the name."""
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Raise a RuntimeError."""
        refuse_second_derivative(ctx.name)


def save_key(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the key, the last argument of an op."""
    ctx.key = inputs[-1]


@contextmanager
def alone(tensor: Tensor) -> Iterator[None]:
    """Enter a context without autograd, and without autocast, which would change the dtypes of some operators."""
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        yield


def batched(x: Tensor, dim: int | None, size: int, *, in_tiles: bool = False) -> Tensor:
    """Return a batch as (size, elements), contiguous.

    Args:
        x: the batch, or one element that all of the batch share.
        dim: the dimension of the batch, None for one element.
        size: how many elements there are.
        in_tiles: whether each element has tiles of its own for its codes, the last one padded.

    """
    batch = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    flat = batch.reshape(size, batch.shape[1:].numel())
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % reference.TILE if in_tiles else 0))


class Op(NamedTuple):
    """An op, as it is defined for PyTorch.

    Attributes:
        schema: its arguments and results.
        by_reference: computes it by PyTorch's operators.
        by_triton: computes it by Triton's kernels.
        fake: returns results without numbers.
        batching: its rule for `torch.vmap`.
        differentiate: its backward; None if it has no derivative.
        save: keeps what backward needs.

    """

    schema: str
    by_reference: Callable[..., Any]
    by_triton: Callable[..., Any]
    fake: Callable[..., Any]
    batching: Callable[..., Any]
    differentiate: Callable[..., Any] | None = None
    save: Callable[..., None] | None = None


def _compilable(name: str, op: Op) -> Callable[..., Any]:
    """Return the fake op, which refuses what PyTorch would compile wrongly: this is called while it compiles."""
    if not MISREADS_DTYPES or "ScalarType" not in op.schema:
        return op.fake

    @wraps(op.fake)
    def fake(*arguments: Any, **named: Any) -> Any:
        if compiles_ahead_of_time():
            raise RuntimeError(
                f"{NAMESPACE}::{name}: PyTorch {torch.__version__} compiles it ahead of time with a wrong dtype: "
                "take 2.12 or later, or export under torch.no_grad(), where activations do without it"
            )
        return op.fake(*arguments, **named)

    return fake


def define(kind: str, found: Mapping[str, Op]) -> None:
    """Define ops in the namespace; they stay if a copy of this runtime with the same text has defined them.

    No schema may end with an optional argument. Inductor's cache on disk leaves a trailing None out of its
    keys, so a later schema without this argument would find graphs that still pass it.
    """
    holder = f"library_of_{kind}"
    if hasattr(ops, holder):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, op in found.items():
        whole = f"{NAMESPACE}::{name}"
        library.define(f"{name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, op.by_reference, "CompositeExplicitAutograd")
        for device in KERNEL_DEVICES:
            library.impl(name, op.by_triton, device.upper())
        torch.library.register_fake(whole, _compilable(name, op), lib=library)
        torch.library.register_vmap(whole, op.batching, lib=library)
        if op.differentiate is not None:
            torch.library.register_autograd(whole, op.differentiate, setup_context=op.save, lib=library)
    setattr(ops, holder, library)  # the ops live as long as this object
