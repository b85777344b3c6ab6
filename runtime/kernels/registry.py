"""What generated modules have registered: the kernels by their keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from . import reference

Two = tuple[Tensor | None, Tensor | None]


class Forward(NamedTuple):
    """The arguments of the op `forward`; `ops` says what they are. `other` is None where a kind has none."""

    x: Tensor
    other: Any
    inner: int
    eps: float
    dims: Sequence[int] | None
    dtype: int
    key: str


class Backward(NamedTuple):
    """The arguments of the op `backward`, likewise."""

    dy: Tensor
    saved: Any
    other: Any
    codes: Any
    inner: int
    dtype: int
    wants_x: bool
    wants_other: bool
    key: str


@dataclass(frozen=True, kw_only=True)
class Kernel(ABC):
    """What is registered under a key. The kinds, its subclasses, say what is saved and how both passes run.

    Attributes:
        key: identifies the fit and the generated text.
        name: its name in messages.
        forward, backward: Triton kernels; their arguments are those that `launch` and `launch_backward` give them.
        bits: bits saved per element as codes.
        saves_output: whether backward needs y.
        saves_input: whether backward needs x.
        reads_views: whether x may be a view; else it is contiguous.
        by_element: whether a batch of `torch.vmap` is computed element by element, not as one tensor.

    """

    key: str
    name: str
    forward: Any
    backward: Any
    bits: int = 0
    saves_output: ClassVar[bool] = False
    saves_input: ClassVar[bool] = True
    reads_views: ClassVar[bool] = False
    by_element: ClassVar[bool] = False

    @property
    def saves_codes(self) -> bool:
        """Whether backward needs the codes."""
        return self.bits > 0

    def codes(self, given: Forward) -> Tensor:
        """Return memory for the codes of x, uint8 (tiles · bits · COLUMNS,)."""
        # in one dimension: a compiler would specialise on a dimension of tiles that is 1
        return given.x.new_empty(reference.bytes_of_codes(given.x, self.bits), dtype=torch.uint8)

    @abstractmethod
    def compute(self, given: Forward) -> tuple[Tensor, Tensor]:
        """Return y, contiguous, and the codes, by PyTorch's operators."""

    @abstractmethod
    def gradients(self, given: Backward) -> Two:
        """Return the gradients of x and of the other tensor, where wanted, likewise; dy has elements."""

    @abstractmethod
    def launch(self, given: Forward, y: Tensor, codes: Tensor) -> None:
        """Launch the forward kernel, which writes y and codes."""

    @abstractmethod
    def launch_backward(self, given: Backward, dx: Tensor | None, d_other: Tensor | None) -> None:
        """Launch the backward kernel, which writes the gradients that are not None."""


KERNELS: dict[str, Kernel] = {}
sources: list[Callable[[str], None]] = []  # called with an unknown key, to register what it names


def register(kernel: Kernel) -> str:
    """Register a kernel with the ops and return its key; repeating this is harmless."""
    KERNELS[kernel.key] = kernel
    return kernel.key


def find(key: str) -> Any:
    """Return the kernel that a key names; a loaded program may use a key before its module is imported.

    Raises:
        RuntimeError: nothing is registered under it.

    """
    for source in sources if key not in KERNELS else ():
        source(key)
    try:
        return KERNELS[key]
    except KeyError:
        raise RuntimeError(
            f"no activation is registered under the key {key!r}: import the generated module it comes from"
        ) from None


def is_generated(kind: type) -> bool:
    """Return whether a class is an activation from `fitact codegen`, registered under the key of its module."""
    return _registration(kind) is not None


def registered(kind: type[nn.Module]) -> Kernel:
    """Return the activation that a generated class has registered."""
    activation = _registration(kind)
    assert activation is not None, f"{kind.__name__} comes from fitact codegen"
    return activation


def _registration(kind: type) -> Kernel | None:
    """Return the activation of one input that a class has registered, None unless it comes from `fitact codegen`.

    Such a module registers its key in its runtime, which is its own copy if it was made with --standalone; and it
    holds the function and the class of what it registers.
    """
    home: Mapping[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
    key, kernels = home.get("_KEY"), getattr(home.get("_rt"), "kernels", None)
    known = getattr(getattr(kernels, "registry", None), "KERNELS", None)
    if not isinstance(key, str) or kind.__module__ != home.get("__name__") or type(known) is not dict:
        return None
    kernel: Kernel | None = known.get(key)
    function = home.get(getattr(kernel, "name", ""))
    own = getattr(function, "__globals__", None) is home and kind.__name__ in home.get("__all__", ())
    return kernel if own and kernel is not None and not kernel.saves_input else None
