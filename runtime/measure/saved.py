"""Counting what autograd saves for backward, by module and by operation.

Storages are counted: two saved tensors with the same storage count once, and parameters and buffers of modules do
not count. Real, fake and meta tensors are counted the same way.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fitact.runtime.kernels import is_generated
from fitact.runtime.restore import following
from fitact.runtime.saving import Watched, blocks
from fitact.runtime.torch_internals import COPY_TO, is_operator, storage_id, version_of, without_torch_function

from .modes import OperationMode

ACTIVATIONS = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
    *("mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign"),
    *("tanh", "tanhshrink", "threshold", "fitact.forward"),
)
ATTENTION = "multi_head_attention_forward", "scaled_dot_product_attention"
LOSSES = "cross_entropy", "nll_loss", "log_softmax", "mse_loss", "binary_cross_entropy_with_logits"
# Operators, by the names of their functions.
PLAIN = {f"r{name}": name for name in ("mul", "add", "sub", "matmul", "pow")}
PLAIN |= {"rtruediv": "div", "truediv": "div", "native_dropout": "dropout"}


@dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd saves, and the operation that saved it first.

    A storage that an activation and another operation both save is counted for the other one, which would save it
    in any case.

    Attributes:
        bytes: its size.
        module: the path of the innermost module that was running; `""` for the outermost one.
        operation: PyTorch's function, e.g. `"gelu"`; `""` if the count is not detailed.
        kind: activation, product (a gate's), norm, linear, convolution, attention, dropout, embedding, loss,
            weights (copies of parameters in another dtype), checkpoint (what its block is given), or other.
        group: the path, with a star for the number of a block or layer that a container repeats: `layers.*.mlp`.

    """

    bytes: int
    module: str = ""
    operation: str = ""
    kind: str = "other"
    group: str = ""


@dataclass(eq=False, repr=False)
class Saved:
    """The distinct storages that autograd has saved so far.

    Attributes:
        storages: the storages by identity; held here, so that no address is used again, until `release`.
        records: what is known of each, likewise.
        owned: identities of the storages that modules own; these are never counted.
        versions: tensors of these storages, with how often each had been changed in place when it was saved.
        times: how often each was saved.
        place: where in the modules the forward pass is; None unless the count is detailed.

    """

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    records: dict[int, SavedStorage] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    versions: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    times: Counter[int] = field(default_factory=Counter)
    place: Place | None = None

    def __repr__(self) -> str:
        return f"Saved({self.bytes:,} bytes in {len(self.records)} storages)"

    @property
    def bytes(self) -> int:
        """Their total size in bytes."""
        return sum(record.bytes for record in self.records.values())

    def release(self) -> None:
        """Hold no storage any more; the count is closed."""
        self.storages.clear()
        self.versions.clear()
        self.place = None

    @property
    def overwritten(self) -> bool:
        """Whether something that is saved has been changed in place since, so that backward cannot use it."""
        return any(version_of(tensor) != version for tensor, version in self.versions.values())

    def by_kind(self, module: str = "") -> dict[str, int]:
        """Return bytes by kind, the largest first, of the module with this path; by default of all."""
        return self._by(lambda record: record.kind, module)

    def by_operation(self) -> dict[str, int]:
        """Return bytes by operation, the largest first."""
        return self._by(lambda record: record.operation)

    def by_module(self) -> dict[str, int]:
        """Return bytes by module, the largest first; repeated modules form one entry, `layers.*.mlp.act`."""
        return self._by(lambda record: record.group)

    def _by(self, key: Callable[[SavedStorage], str], module: str = "") -> dict[str, int]:
        sums: Counter[str] = Counter()
        for record in self.records.values():
            if not module or f"{record.module}.".startswith(f"{module}."):
                sums[key(record)] += record.bytes
        return dict(sums.most_common())

    def add(self, tensor: Tensor, kind: str = "") -> Callable[[], None]:
        """Count a tensor's storage, if it is new and no module owns it; by default its kind is the operation's.

        A sparse tensor, which has no storage, is not counted. What is returned is to be called if the tensor turns
        out not to be saved.
        """
        key = storage_id(tensor)
        if tensor.layout is not torch.strided or key in self.owned:
            return lambda: None
        self.times[key] += 1
        storage, before = tensor.untyped_storage(), self.records.get(key) if key in self.storages else None
        if before is None:
            self.storages[key] = storage
            self.versions[key] = tensor.detach(), version_of(tensor)
        if self.place is None:
            self.records[key] = SavedStorage(storage.nbytes())
        elif before is None or before.kind == "activation":
            record = self.place.record(storage)
            self.records[key] = replace(record, kind=kind) if kind else record
        return functools.partial(self._drop, key)

    def _drop(self, key: int) -> None:
        self.times[key] -= 1
        if key in self.storages and not self.times[key] and self in counts:
            del self.storages[key], self.records[key], self.versions[key]


counts: list[Saved] = []  # that are open


def count_unseen(tensors: Iterable[Any]) -> None:
    """Count tensors that autograd saves, and does not show: those of a checkpoint."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            for saved in counts:
                saved.add(tensor, "checkpoint")


@contextmanager
def count_saved(*modules: nn.Module, detail: bool = False) -> Iterator[Saved]:
    """Count the storages that autograd saves for operations inside the context.

    Args:
        modules: modules whose parameters and buffers are not counted.
        detail: whether to record each storage with the module and the operation that saved it first. Not for
            compiled modules, where neither is visible.

    Yields:
        The count, which grows while the context is open. It works for real, fake and meta tensors. Codes of a
        generated activation count with their own size, k bits per element.

    """
    owned = {storage_id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    saved = Saved(owned=owned)

    def pack(tensor: Tensor) -> Watched:
        # what has a node is stored detached: an output that is stored as it is holds the node that saves it, so
        # that neither would ever be freed
        with without_torch_function():  # this is no operation of the model
            return Watched(tensor if tensor.grad_fn is None else tensor.detach(), saved.add(tensor))

    with ExitStack() as stack:
        if detail:
            place = saved.place = Place(modules)
            stack.enter_context(following(place.enter, place.leave))
            stack.enter_context(place)
            stack.enter_context(_Copies(place, owned))
        counts.append(saved)
        stack.callback(counts.remove, saved)
        stack.enter_context(saved_tensors_hooks(pack, attrgetter("tensor")))
        yield saved


class Place(TorchFunctionMode):
    """The place in a model that the forward pass has reached: a mode, which sees the functions that run.

    The tensors that a function saves are packed before it returns.

    Attributes:
        operation: the name of the function that ran last.
        copies: storages that are copies of the modules' own tensors, by identity.

    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.operation = ""
        self.copies: dict[int, torch.UntypedStorage] = {}
        self._names: dict[int, tuple[str, str]] = {}
        for root in modules:
            self._add(root, "", "")
        self._running: list[nn.Module] = []

    def _add(self, module: nn.Module, path: str, group: str) -> None:
        if id(module) in self._names:
            return
        self._names[id(module)] = path.removesuffix("."), group.removesuffix(".")
        classes = Counter(type(child) for child in module.children())
        for name, child in module.named_children():
            repeated = len(classes) == 1 or (classes[type(child)] > 1 and any(child.children()))
            self._add(child, f"{path}{name}.", f"{group}{'*' if repeated and name.isdigit() else name}.")

    @property
    def module(self) -> tuple[str, str]:
        """The path of the innermost module that is running, and that of its group."""
        if not self._running:
            return "", ""
        other: str = type(self._running[-1]).__name__
        return self._names.get(id(self._running[-1]), (other, other))

    def enter(self, module: nn.Module, _: Any) -> None:
        """Record that a module runs."""
        self._running.append(module)

    def leave(self, *_: Any) -> None:
        """Record that the innermost module has run."""
        self._running.pop()

    def record(self, storage: torch.UntypedStorage) -> SavedStorage:
        """Return the record of a storage that is saved now."""
        kind = "weights" if storage_id(storage) in self.copies else _kind(self._running, self.operation)
        path, group = self.module
        return SavedStorage(storage.nbytes(), path, self.operation, kind, group)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attributes are read by get; new_empty is how a fitact activation ties its gradient to its input.
        if (name := _name(func)) not in ("get", "set", "new_empty"):
            self.operation = name
        return func(*args, **(kwargs or {}))


def _name(function: Any) -> str:
    """Return the name of a PyTorch function for a table: `mul` for `__rmul__` and `mul_`."""
    if is_operator(function):
        return str(function).removesuffix(".default").removeprefix("aten.")
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    return PLAIN.get(name, name)


class _Copies(OperationMode):
    """Records copies of a module's own tensors in another dtype or order, such as autocast's copies of weights."""

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
    """Return the kind of what an operation saves inside modules, the innermost last."""
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
    """Make a CPU save what a GPU's kernels save, where PyTorch's kernels differ.

    Dropout saves a mask of one byte per element, as on a GPU; on a CPU it would save one of its input's dtype.
    Fused attention has no dropout on a CPU: it would be composed of operations that save the scores. So it runs
    without dropout; on a GPU its dropout saves only the generator's state, 16 bytes. Block codes of fake tensors
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
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **given: Any
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *more, **given)

    with (
        mock.patch.object(F, "dropout", masked),
        mock.patch.object(F, "scaled_dot_product_attention", fused),
        mock.patch.object(blocks, "FAKE_AS_ON_A_GPU", True),
    ):
        yield
