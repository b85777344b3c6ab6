"""Models with what runs them: with fake tensors, which have no memory, or with real ones."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from fitact.base import UsageError, few, one_line, quote
from fitact.runtime import restore
from fitact.runtime.restore import Inputs, Runner
from fitact.runtime.saving import blocks
from fitact.runtime.torch_internals import (
    BATCH_NORM,
    FakeTensor,
    FakeTensorMode,
    fake_mode,
    quiet_fake_tensors,
    tree_leaves,
)

from .modes import OperationMode
from .saved import gpu_kernels

aten = torch.ops.aten
NORMS = (aten.native_batch_norm, BATCH_NORM, aten.native_group_norm, aten.native_layer_norm)
# Classes of FSDP: a forward pass gathers their parameters, and only the backward pass gives them back.
SHARDED = ("FSDPModule", "FullyShardedDataParallel")
Look = TypeVar("Look")
Patterns = str | Sequence[str] | None
Example = tuple[nn.Module, Inputs]


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        name: its name in tables.
        build: makes the model and its inputs from batch and seq.
        varies: which of `"batch"` and `"seq"` it uses.
        longest: the largest seq that the model has positions for; None if there is no limit.

    """

    name: str
    build: Callable[[int, int], Example]
    varies: frozenset[str] = frozenset(("batch", "seq"))
    longest: Callable[[nn.Module], int | None] = lambda model: None

    def sizes(self, batch: int, seq: int) -> str:
        """Return the sizes of inputs for a table."""
        given = [f"{name} {size}" for name, size in (("batch", batch), ("seq", seq)) if name in self.varies]
        return ", ".join(given) or "inputs as given"


@dataclass(frozen=True)
class Subject:
    """A model with what runs it.

    Attributes:
        name: its name in tables.
        model: the model, in training mode.
        call: runs it.
        mode: the mode of its fake tensors; None if they are real.
        autocast: the dtype of autocast; None if it is off.
        device: `"cuda"` to save what a GPU's kernels save, or `"cpu"`.
        blocks: patterns of the paths of its blocks; none for the modules that it repeats.
        ranks: how many processes share it by FSDP2.
        ddp: whether it is in DistributedDataParallel.
        accumulates: whether gradients of earlier steps are there already.
        training, inputs: in tables, what is trained, and the sizes of its inputs.

    """

    name: str
    model: nn.Module
    call: Runner
    mode: FakeTensorMode | None
    autocast: torch.dtype | None = None
    device: str = "cuda"
    blocks: Patterns = None
    ranks: int = 1
    ddp: bool = False
    accumulates: bool = False
    training: str = "what needs gradients is trained"
    inputs: str = "inputs as given"

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Enter what surrounds a step, which has gradients wherever it is called from."""
        memory = without_memory(self.mode) if self.mode else without_packing()
        kernels = gpu_kernels() if self.device == "cuda" else nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), memory, kernels:
            yield

    def casting(self) -> AbstractContextManager[Any]:
        """Return a context of the subject's autocast."""
        if self.autocast is None:
            return nullcontext()
        kind = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        return torch.autocast(kind, dtype=self.autocast)

    def forward(self) -> list[Tensor]:
        """Run forward; return what backward starts from: the loss of the output if there is one, or all tensors.

        Raises:
            UsageError: the model cannot be run, or no output depends on what is trained.

        """
        with restore.explained(self.name, "forward"), self.casting():
            output = self.call(self.model)
        loss = restore.loss_of(output)
        leaves = tree_leaves(output) if loss is None else [loss]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors:
            raise UsageError(f"{self.name}: no output depends on what is trained")
        return tensors

    def run(self) -> list[Tensor]:
        """Run forward in the environment of a step; see `forward`."""
        with self.environment():
            return self.forward()


def fake_copy(model: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """Return a copy of a model with fake tensors, and their mode: the model's own, or a new one."""
    tensors = (*model.parameters(), *model.buffers())
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else fake_mode()
    made = partial(fake, mode)
    with restore.Copying(made, made):
        return copy.deepcopy(model), mode


def fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor like another; like one without memory, on the CPU."""
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return mode.from_tensor(tensor)
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def faked(run: Runner, mode: FakeTensorMode) -> Runner:
    """Return what runs a model with fake inputs; a function of the user's makes its own."""
    return run.mapped(partial(fake, mode)) if isinstance(run, Inputs) else run


def converted(inputs: Inputs, mode: FakeTensorMode, dtype: torch.dtype) -> Inputs:
    """Return inputs as fake tensors, those of floating point with a dtype."""

    def made(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        return fake(mode, tensor)

    return inputs.mapped(made)


def copied(
    model: nn.Module,
    example_inputs: Any,
    autocast: torch.dtype | None = None,
    device: str = "cuda",
    blocks: Patterns = None,
) -> Subject:
    """Return a user's model as a subject, copied as fake tensors, or with its values where it reads them.

    The model is not changed. `example_inputs` are as for `fitact.convert`, the others as in `Subject`.

    Raises:
        UsageError: it is no nn.Module, or cannot be copied or run.

    """
    restore.check_model(model)
    restore.check_initialised(model)
    run = restore.runner(example_inputs)
    name = type(model).__name__
    try:
        with torch.inference_mode(False):
            fake, mode = fake_copy(model)
            call = faked(run, mode)
    except Exception as error:
        raise UsageError(f"{name}: it cannot be copied without memory: {one_line(error)}") from error
    subject = Subject(name, fake.train(), call, mode, autocast, device, blocks)
    try:
        with restore.generators(model), subject.environment(), restore.unchanged(fake):
            subject.forward()
    except UsageError as error:
        if not isinstance(error.__cause__, restore.NO_VALUES) or restore.has_no_values(model):
            raise
        return replace(subject, model=copy.deepcopy(model).train(), call=restore.real(run), mode=None)
    return subject


class Statistics(OperationMode):
    """Gives fake norms the statistics of real norms, which are in float32 if any parameter is.

    PyTorch's fake kernels for the CPU give them the input's dtype, which has half as many bits under autocast.
    """

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func.overloadpacket not in NORMS or args[0].dtype == torch.float32:
            return result
        if not any(isinstance(other, Tensor) and other.dtype == torch.float32 for other in args[1:]):
            return result
        return (result[0], *(statistic.to(torch.float32) for statistic in result[1:]))


@contextmanager
def without_memory(mode: FakeTensorMode) -> Iterator[None]:
    """Enter a context in which a model of fake tensors saves what a real one saves."""
    with mode, Statistics(), without_packing(), quiet_fake_tensors():
        yield


@contextmanager
def without_packing() -> Iterator[None]:
    """Tell transformers that each row is one sequence.

    It reads the values of position_ids to find packed sequences, and would take fake ones for packed.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with mock.patch.object(masks, "find_packed_sequence_indices", return_value=None):
        yield


def trials(model: nn.Module, run: Runner, looks: Sequence[Callable[[nn.Module, Runner], Look]]) -> list[Look]:
    """Look at a model several times; each time it may be changed, and run.

    It is run as it trains: in its own mode, or in training mode if it is in evaluation mode as a whole. Every look
    takes the model and what runs it, and starts from the same state. Fake copies are run; where that is not
    possible, because the model looks at values, the model itself is run, and restored, as the generators are.

    Raises:
        UsageError: the model cannot be run, or is sharded.

    """
    if any(kind.__name__ in SHARDED for module in model.modules() for kind in type(module).__mro__):
        raise UsageError("the model is sharded, and cannot be run forward alone: convert it first, then shard it")
    restore.check_initialised(model)

    def looked(
        of: nn.Module, again: Callable[[], Runner], around: Callable[[], AbstractContextManager[Any]]
    ) -> list[Look]:
        results = []
        for look in looks:
            torch.clear_autocast_cache()  # of casts that the look before has made
            with restore.generators(model), around(), restore.unchanged(of):
                results.append(look(of if of.training else of.train(), again()))
        return results

    as_kernels = mock.patch.object(blocks, "FAKE_AS_ON_A_GPU", True)  # looks count what is saved alone
    with torch.inference_mode(False), torch.enable_grad(), as_kernels:
        try:
            fake, mode = fake_copy(model)
            return looked(fake, partial(faked, run, mode), partial(without_memory, mode))
        except Exception:  # whatever fake tensors cannot do, real ones may
            return looked(model, partial(restore.real, run), nullcontext)
        finally:
            torch.clear_autocast_cache()


def matching(paths: Collection[str], given: Patterns, name: str, what: str) -> list[str]:
    """Return the paths that patterns match; a UsageError for one without names the argument and what has paths."""
    patterns = [given] if isinstance(given, str) else given or ()
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UsageError(f"{name} {quote(pattern)}: no {what} has such a path; there are {few([*paths])}")
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def inside(path: str, others: Collection[str]) -> bool:
    """Return whether a path is inside of any of other paths."""
    return any(path.startswith(f"{other}.") for other in others)


def outermost(paths: Collection[str]) -> list[str]:
    """Return the paths that are not inside of others."""
    return [path for path in paths if not inside(path, paths)]


def blocks_of(model: nn.Module, patterns: Patterns = None) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model, by name: the repeated ones, or those whose paths match patterns.

    The longest nn.ModuleList or nn.Sequential gives the kind of a block: its most frequent class, or plain
    nn.Sequentials that hold the same. All modules of that kind are blocks. A model that repeats nothing is itself
    the only block.

    Raises:
        UsageError: a pattern matches no module.

    """
    modules = dict(model.named_modules())
    if patterns:
        paths = outermost(matching([path for path in modules if path], patterns, "blocks", "module"))
        return [(path, modules[path]) for path in paths]
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    counts: Counter[Any] = Counter()
    for module in modules.values():
        if isinstance(module, containers):
            own = Counter(_kind(child) for child in module.children() if any(child.children()))
            counts |= Counter({kind: count for kind, count in own.items() if kind and count > 1})
    if not counts:
        return [("", model)]
    kind = max(counts, key=lambda kind: (counts[kind], isinstance(kind, type)))
    paths = outermost([path for path, module in modules.items() if _kind(module) == kind])
    return [(path, modules[path]) for path in paths]


def _kind(module: nn.Module) -> Any:
    """Return what blocks have in common: a class, or what a plain nn.Sequential holds; None for containers."""
    if type(module) is nn.Sequential:
        return tuple(map(type, module.modules())), tuple(parameter.shape for parameter in module.parameters())
    return None if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) else type(module)
