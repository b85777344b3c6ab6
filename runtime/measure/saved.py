"""Counting what autograd keeps for backward, by module and by operation.

Storages are counted: two saved tensors with the same storage count once, and parameters and buffers of modules do
not count. Real, fake and meta tensors are counted alike.

`fitact.runtime.choose.compare` uses this to measure a whole model, as it is and with each method and baseline.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fitact.runtime.kernels import is_generated
from fitact.runtime.restore import following
from fitact.runtime.saving import blocks
from fitact.runtime.torch_internals import COPY_TO, is_operator, storage_id, version_of

from .modes import OperationMode, watching_saved

ACTIVATIONS = frozenset(
    [
        *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
        *("mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softplus", "softshrink"),
        *("softsign", "tanh", "tanhshrink", "threshold", "fitact.forward"),
    ]
)
ATTENTION = frozenset(["multi_head_attention_forward", "scaled_dot_product_attention"])
LOSSES = frozenset(["cross_entropy", "nll_loss", "log_softmax", "mse_loss", "binary_cross_entropy_with_logits"])
# Operators, by the names of their functions.
PLAIN = {
    "rmul": "mul",
    "radd": "add",
    "rsub": "sub",
    "rtruediv": "div",
    "truediv": "div",
    "rmatmul": "matmul",
    "rpow": "pow",
    "native_dropout": "dropout",
}


# Kinds of what keeps storages: `product` is a gate's, `weights` a copy of parameters in another dtype.
KINDS = (
    *("activation", "product", "norm", "linear", "convolution", "attention", "dropout"),
    *("embedding", "loss", "weights", "other"),
)


@dataclass(frozen=True)
class Kept:
    """One storage that autograd keeps, and the operation that kept it first.

    If an activation and another operation both keep it, it counts for the other one, which would keep it anyway.

    Attributes:
        bytes: its size.
        module: the path of the innermost module that was running; `""` for the outermost one.
        operation: PyTorch's function, e.g. `"gelu"`.
        kind: one of KINDS.

    """

    bytes: int
    module: str
    operation: str
    kind: str


@dataclass(eq=False)
class Saved:
    """The distinct storages that autograd has kept so far.

    Attributes:
        storages: the storages by identity; held here, so that no address is used again, until `release`.
        sizes: their bytes, likewise.
        kept: the same storages as records; empty unless the count is detailed.
        kinds: the kinds of operations that kept anything, if the count is detailed.
        owned: identities of the storages that modules own; these are never counted.
        versions: tensors of these storages, with how often each had been changed in place when it was kept.
        place: where in the modules the forward pass is; None unless the count is detailed.

    """

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    owned: set[int] = field(default_factory=set)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    place: Place | None = None

    @property
    def bytes(self) -> int:
        """Their total size in bytes."""
        return sum(self.sizes.values())

    def release(self) -> None:
        """Hold no storage any more; the count is closed."""
        self.storages.clear()
        self.versions.clear()
        self.place = None

    @property
    def overwritten(self) -> bool:
        """Whether something that is kept has been changed in place since, so that backward cannot use it."""
        return any(version_of(tensor) != version for tensor, version in self.versions)

    def by_kind(self, module: str = "") -> dict[str, int]:
        """Return bytes by kind, the largest first, of the module with this path; by default of all."""
        inside = [kept for kept in self.kept.values() if not module or f"{kept.module}.".startswith(f"{module}.")]
        return _sums((kept.kind, kept.bytes) for kept in inside)

    def by_operation(self) -> dict[str, int]:
        """Return bytes by operation, the largest first."""
        return _sums((kept.operation, kept.bytes) for kept in self.kept.values())

    def by_module(self) -> dict[str, int]:
        """Return bytes by module, the largest first; repeated modules form one entry, `layers.*.mlp.act`."""
        return _sums((re.sub(r"\b\d+\b", "*", kept.module), kept.bytes) for kept in self.kept.values())

    def add(self, tensor: Tensor) -> bool:
        """Count a tensor's storage, and return whether it is new."""
        storage = tensor.untyped_storage()
        if storage_id(storage) in self.owned or storage_id(storage) in self.storages:
            return False
        self.storages[storage_id(storage)] = storage
        self.sizes[storage_id(storage)] = storage.nbytes()
        self.versions.append((tensor.detach(), version_of(tensor)))
        return True


counts: list[Saved] = []  # that are open


def keep_unseen(tensors: Iterable[Any]) -> None:
    """Count tensors that autograd keeps, and does not show: those of a checkpoint."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            for saved in counts:
                saved.add(tensor)


def _sums(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, size in pairs:
        sums[name] += size
    return dict(sums.most_common())


@contextmanager
def count_saved(*modules: nn.Module, detail: bool = False) -> Iterator[Saved]:
    """Count the storages that autograd keeps for operations inside the context.

    Args:
        modules: modules whose parameters and buffers are not counted.
        detail: whether to record each storage with the module and the operation that kept it first. Not for
            compiled modules, where neither is visible.

    Yields:
        The count, which grows while the context is open. It works for real, fake and meta tensors. Codes of a
        generated activation count with their own size, k bits per element.

    """
    owned = {
        storage_id(tensor)
        for module in modules
        for tensors in (module.parameters(), module.buffers())
        for tensor in tensors
    }
    saved = Saved(owned=owned)
    with ExitStack() as stack:
        place = saved.place = stack.enter_context(place_in(modules, owned)) if detail else None
        counts.append(saved)
        stack.callback(counts.remove, saved)

        def see(tensor: Tensor) -> None:
            new, storage = saved.add(tensor), tensor.untyped_storage()
            if place is not None and storage_id(storage) in saved.storages:
                record, before = place.record(storage), saved.kept.get(storage_id(storage))
                saved.kinds.add(record.kind)
                if new or (before is not None and before.kind == "activation"):
                    saved.kept[storage_id(storage)] = record

        stack.enter_context(watching_saved(see))
        yield saved


@dataclass
class Place:
    """The place in the model that the forward pass has reached."""

    names: Mapping[int, str]
    running: list[tuple[str, nn.Module]] = field(default_factory=list)
    operation: str = ""
    copies: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Note that a module runs."""
        self.running.append((self.names.get(id(module), type(module).__name__), module))

    def leave(self, *_: Any) -> None:
        """Note that the innermost module has run."""
        self.running.pop()

    def record(self, storage: torch.UntypedStorage) -> Kept:
        """Return the record of a storage that is kept now."""
        modules = [module for _, module in self.running]
        kind = "weights" if storage_id(storage) in self.copies else _kind(modules, self.operation)
        return Kept(storage.nbytes(), self.module, self.operation, kind)

    @property
    def module(self) -> str:
        """The path of the innermost module that is running."""
        return self.running[-1][0] if self.running else ""


@contextmanager
def place_in(modules: tuple[nn.Module, ...], owned: set[int]) -> Iterator[Place]:
    """Follow the forward pass through modules; `owned` has the identities of the storages that they own."""
    place = Place({id(module): name for root in modules for name, module in root.named_modules()})
    with following(place.enter, place.leave), _Operations(place), _Copies(place, owned):
        yield place


class _Operations(TorchFunctionMode):
    """Notes which function of PyTorch runs; the tensors that it keeps are packed before it returns."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attributes are read by get; new_empty is how a fitact activation ties its gradient to its input.
        if (name := _name(func)) not in ("get", "set", "new_empty"):
            self.place.operation = name
        return func(*args, **(kwargs or {}))


def _name(function: Any) -> str:
    """Return the name of a PyTorch function for a table: `mul` for `__rmul__` and `mul_`."""
    if is_operator(function):
        return str(function).removesuffix(".default").removeprefix("aten.")
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    return PLAIN.get(name, name)


class _Copies(OperationMode):
    """Notes copies of a module's own tensors in another dtype or order, such as autocast's copies of weights."""

    def __init__(self, place: Place, owned: set[int]) -> None:
        super().__init__()
        self.place, self.owned = place, owned

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func in (COPY_TO, torch.ops.aten.clone.default):
            source, storage = storage_id(args[0]), result.untyped_storage()
            if (source in self.owned or source in self.place.copies) and storage_id(storage) != source:
                self.place.copies[storage_id(storage)] = storage
        return result


def _kind(modules: list[nn.Module], operation: str) -> str:
    """Return the kind of what an operation keeps inside modules, the innermost last."""
    inner = type(modules[-1]).__name__ if modules else ""
    if modules and is_activation(modules[-1]):
        return "activation"
    if inner.endswith(("Loss", "LossFunction")) or operation in LOSSES:
        return "loss"
    for kind, words in (
        ("norm", ("Norm", "norm")),
        ("dropout", ("Dropout", "dropout", "DropPath", "StochasticDepth")),
        ("convolution", ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose", "conv1d", "conv2d", "conv3d")),
        ("linear", ("Linear", "Conv1D", "linear", "addmm")),  # Conv1D is GPT-2's linear layer in transformers
    ):
        if any(word in inner or word == operation or (kind == "norm" and word in operation) for word in words):
            return kind
    if operation in ACTIVATIONS:
        return "activation"
    if operation in ATTENTION or any("attention" in type(module).__name__.lower() for module in modules):
        return "attention"
    if "Embed" in inner or operation == "embedding":
        return "embedding"
    return "product" if operation == "mul" else "other"


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is a pointwise activation of PyTorch, transformers, timm or fitact."""
    home, name = type(module).__module__, type(module).__name__
    if home == "torch.nn.modules.activation":
        return not name.startswith(("GLU", "LogSoftmax", "MultiheadAttention", "Softmax", "Softmin"))
    if home in ("transformers.activations", "timm.layers.activations"):
        return True
    return is_generated(type(module))


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Make a CPU keep what a GPU's kernels keep, where PyTorch's kernels differ.

    Dropout keeps a mask of one byte per element, as on a GPU; on a CPU it would keep one of its input's dtype.
    Fused attention has no dropout on a CPU: it would be composed of operations that keep the scores. So it runs
    without dropout; on a GPU its dropout keeps only the generator's state, 16 bytes. Block codes of fake tensors
    are made and read as by a kernel, with no other memory.
    """
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    @functools.wraps(dropout)
    def masked(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or inplace or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    @functools.wraps(attention)
    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *more: Any,
        **given: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *more, **given)

    with (
        mock.patch.object(F, "dropout", masked),
        mock.patch.object(F, "scaled_dot_product_attention", fused),
        mock.patch.object(blocks, "FAKE_AS_ON_A_GPU", True),
    ):
        yield
