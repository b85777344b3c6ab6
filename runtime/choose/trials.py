"""What autograd keeps for each activation of a model, measured by running the model.

The model is copied as fake tensors, which have no memory, and the copy is run. Where that is not possible (a copy
or fake tensors that fail, because the model looks at values) the model itself is run, and put back as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fitact.errors import FitactError, UsageError
from fitact.runtime.kernels.inputs import DTYPES
from fitact.runtime.measure.prepare import Statistics, without_packing
from fitact.runtime.measure.saved import ACTIVATIONS, Kept, Place, Saved, place_in
from fitact.runtime.measure.twins import Twins, fake
from fitact.runtime.modes import watching_saved
from fitact.runtime.restore import Call, Run, generators, real, unchanged
from fitact.runtime.torch_internals import (
    FakeTensorMode,
    is_compiled,
    quiet_fake_tensors,
    storage_id,
    tree_leaves,
    version_of,
)
from fitact.text import one_line, starred

from .detect import ActivationSite, activation_sites
from .records import Unseen

# Replaces activations of the model, given where they are, until the context ends.
Plan = Callable[[Sequence[ActivationSite]], AbstractContextManager[Any]]
stock: Plan = nullcontext


@dataclass(frozen=True)
class Usage:
    """What one activation keeps.

    Attributes:
        kept: bytes of the storages that nothing but activations keep; what several of them keep is shared out.
        shared: whether another operation keeps the very storage of each of its outputs; None if it was not run.
        overwritten: whether something has changed one of its outputs in place, so that backward cannot use it.
        dtypes: those of its outputs.
        alone: bytes of the storages that no other activation keeps either.

    """

    kept: int
    shared: bool | None
    overwritten: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    alone: int = 0

    @property
    def foreign(self) -> torch.dtype | None:
        """A dtype of its outputs that no replacement takes; None if there is none."""
        return next((dtype for dtype in self.dtypes if dtype not in DTYPES), None)


@dataclass(frozen=True)
class Trace:
    """What a forward pass keeps.

    Attributes:
        kept: bytes of all distinct storages.
        usages: one for each site, the same for those that hold the same module.
        random: whether random numbers were drawn.
        unseen: activations that are at no site, if the trace is detailed.

    """

    kept: int
    usages: tuple[Usage, ...]
    random: bool = False
    unseen: tuple[Unseen, ...] = ()


def traces(
    model: nn.Module,
    run: Run,
    own: frozenset[type],
    plans: Sequence[Plan],
    *,
    attempt: int = 0,
    detail: bool = False,
    twins: Twins | None = None,
) -> list[Trace]:
    """Run a model once with each plan, in the caller's autocast, and return what each run keeps.

    Every run starts from the same state, so that a model that leaves out layers at random leaves out the same.

    Args:
        model: neither it nor the generators of random numbers, PyTorch's and Python's, are changed. It is run as
            it trains: in its own mode, or in training mode if it is in evaluation mode as a whole.
        run: runs it.
        own: classes that are activations too.
        plans: replace activations of it.
        attempt: with which random numbers: 0 for those that come next, others are seeds.
        detail: whether to report activations that are at no site; not for models with compiled modules.
        twins: makes the fake copies of the model; it is faster if one object makes all copies of a model.

    Raises:
        UsageError: the model cannot be run, is sharded, or nothing in it is trained.

    """
    detail = detail and not any(map(is_compiled, model.modules()))  # a copy of a compiled module is not
    looks = [partial(_planned_trace, plan=plan, own=own, detail=detail) for plan in plans]
    return [
        replace(trace, random=random) for trace, random in runs(model, run, looks, attempt=attempt, twins=twins)
    ]


Look = TypeVar("Look")


def runs(
    model: nn.Module,
    run: Run,
    looks: Sequence[Callable[[nn.Module, Run], Look]],
    *,
    attempt: int = 0,
    twins: Twins | None = None,
) -> list[tuple[Look, bool]]:
    """Look at a model several times, as `traces` does; each time it may be changed, and run.

    Args:
        model: the model, which is unchanged in the end, as the generators of random numbers are.
        run: runs it.
        looks: functions of the model, or of a fake copy, in training mode, and of what runs it.
        attempt: with which random numbers.
        twins: makes the fake copies.

    Returns:
        What each function returns, and whether random numbers were drawn.

    Raises:
        UsageError: the model cannot be run, is sharded, or nothing in it is trained.

    """
    if any(kind.__name__ in SHARDED for module in model.modules() for kind in type(module).__mro__):
        raise UsageError("the model is sharded, and cannot be run forward alone: convert it first, then shard it")
    check_initialised(model)
    with torch.inference_mode(False), torch.enable_grad():
        try:
            return _on_fakes(model, run, looks, attempt, twins or Twins())
        except _UntrainedError:
            raise
        except Exception:  # whatever fake tensors cannot do, real ones may
            return [_on_real(model, run, look, attempt) for look in looks]
        finally:
            torch.clear_autocast_cache()  # of the weights as they were cast here


def check_initialised(model: nn.Module) -> None:
    """Raise a UsageError if a model has parameters whose shapes its first run decides."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError("the model has parameters that are not initialised yet: run it once, then convert it")


# Classes of FSDP: a forward pass gathers their parameters, and only the backward pass gives them back.
SHARDED = ("FSDPModule", "FullyShardedDataParallel")


def faked_run(run: Run, mode: FakeTensorMode) -> Run:
    """Return what runs a model with fake inputs; a function of the user's makes its own."""
    return run.mapped(partial(fake, mode)) if isinstance(run, Call) else run


class _UntrainedError(UsageError):
    """Nothing that is trained has a part in the output."""


def _on_fakes(
    model: nn.Module, run: Run, looks: Sequence[Callable[[nn.Module, Run], Look]], attempt: int, twins: Twins
) -> list[tuple[Look, bool]]:
    twin, mode = twins.of(model)
    found = []
    for look in looks:
        torch.clear_autocast_cache()  # of casts that the look before has made
        with generators(model, attempt) as draws:
            with mode, Statistics(), without_packing(), quiet_fake_tensors(), unchanged(twin):
                seen = look(_training(twin), faked_run(run, mode))
            found.append((seen, draws()))
    return found


def _on_real(
    model: nn.Module, run: Run, look: Callable[[nn.Module, Run], Look], attempt: int
) -> tuple[Look, bool]:
    torch.clear_autocast_cache()
    with generators(model, attempt) as draws:
        with unchanged(model):
            seen = look(_training(model), real(run))
        return seen, draws()


def _training(model: nn.Module) -> nn.Module:
    """Return a model, in training mode if all of it is in evaluation mode."""
    return model if model.training else model.train()


def _planned_trace(model: nn.Module, run: Run, plan: Plan, own: frozenset[type], detail: bool) -> Trace:
    with plan(activation_sites(model, own)):
        return _trace(model, run, own, detail)


def _trace(model: nn.Module, run: Run, own: frozenset[type], detail: bool) -> Trace:
    sites = activation_sites(model, own)
    owned = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    watch = _Watch(Saved(owned=owned))
    with ExitStack() as stack:
        for site in {site.key: site for site in sites}.values():
            stack.enter_context(watch.watched(site))
        if detail:
            watch.place = stack.enter_context(place_in((model,), owned))
        stack.enter_context(watching_saved(watch.keep))
        run_trained(run, model)
    return watch.trace([site.key for site in sites])


def run_trained(run: Run, model: nn.Module) -> None:
    """Run a model; raise a UsageError if no output depends on anything that is trained."""
    leaves = tensors_of(run, model)
    if leaves and not any(leaf.requires_grad for leaf in leaves):
        raise _UntrainedError("no output of the model depends on anything that is trained: nothing is saved")


def tensors_of(run: Run, model: nn.Module) -> list[Tensor]:
    """Run a model, and return the tensors of its output; raise a UsageError if it cannot be run."""
    try:
        return [leaf for leaf in tree_leaves(run(model)) if isinstance(leaf, Tensor)]
    except FitactError:
        raise
    except Exception as error:
        raise UsageError(f"the model cannot be run with example_inputs: {one_line(error)}") from error


@dataclass
class _Watch:
    """Notes which storages are kept, by which activation or by something else, and what activations return."""

    saved: Saved
    running: list[Any] = field(default_factory=list)
    keepers: dict[int, set[Any]] = field(default_factory=dict)
    outputs: dict[Any, list[tuple[Tensor, int]]] = field(default_factory=dict)  # with their versions
    place: Place | None = None  # where the model is, if that is looked at
    elsewhere: dict[int, list[Kept]] = field(default_factory=dict)  # what is kept by something else

    def keep(self, tensor: Tensor) -> None:
        self.saved.add(tensor)
        storage = storage_id(tensor)
        if storage in self.saved.storages:
            self.keepers.setdefault(storage, set()).add(self.running[-1] if self.running else None)
            if self.place is not None and not self.running:
                self.elsewhere.setdefault(storage, []).append(self.place.record(tensor.untyped_storage()))

    def enter(self, key: Any, *_: Any) -> None:
        self.running.append(key)

    def leave(self, module: Any, _: Any, output: Any) -> None:
        key = self.running.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):  # its storage is held, so that the address is not another's
                self.outputs.setdefault(key, []).append((leaf.detach(), version_of(leaf)))

    @contextmanager
    def watched(self, site: ActivationSite) -> Iterator[None]:
        held, key = site.held, site.key
        if isinstance(held, nn.Module):
            entered = held.register_forward_pre_hook(lambda *_: self.enter(key))
            left = held.register_forward_hook(self.leave)
            try:
                yield
            finally:
                entered.remove()
                left.remove()
        else:
            site.put(partial(self.call, held, key))
            try:
                yield
            finally:
                site.put(held)

    def call(self, function: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
        self.enter(key)
        output = function(*args, **kwargs)
        self.leave(function, args, output)
        return output

    def trace(self, keys: Sequence[Any]) -> Trace:
        kept, only = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
        order = {key: i for i, key in enumerate(kept)}
        for storage, keepers in self.keepers.items():
            if None not in keepers:
                share, rest = divmod(self.saved.storages[storage].nbytes(), len(keepers))
                for i, key in enumerate(sorted(keepers, key=order.__getitem__)):
                    kept[key] += share + (i < rest)
                    only[key] += share if len(keepers) == 1 else 0
        usages = (
            Usage(kept[key], self.shared(key), self.overwritten(key), self.dtypes(key), only[key]) for key in keys
        )
        alone = [kept for storage, kept in self.elsewhere.items() if self.keepers[storage] == {None}]
        return Trace(self.saved.bytes, tuple(usages), unseen=tuple(_unseen(alone, self.saved.bytes)))

    def shared(self, key: Any) -> bool | None:
        if key not in self.outputs:
            return None
        storages = (storage_id(tensor) for tensor, _ in self.outputs[key])
        return all(self.keepers.get(storage, set()) - {key} for storage in storages)

    def overwritten(self, key: Any) -> bool:
        return any(version_of(tensor) != version for tensor, version in self.outputs.get(key, ()))

    def dtypes(self, key: Any) -> tuple[torch.dtype, ...]:
        return tuple({tensor.dtype: None for tensor, _ in self.outputs.get(key, ())})


# Elementwise functions: those that show that there is an activation, and those that may be part of one.
CURVED = (ACTIVATIONS - {"fitact.forward"}) | {"erf", "exp", "expm1", "log1p"}
POINTWISE = CURVED | {"abs", "add", "clamp", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "neg"}
POINTWISE |= {"pow", "reciprocal", "rsqrt", "sqrt", "square", "sub", "where"}
OTHER_KINDS = frozenset(("norm", "loss", "weights", "dropout", "embedding"))
SMALL = 100  # less than a hundredth of what the model keeps is not reported


def _unseen(storages: Sequence[Sequence[Kept]], total: int) -> Iterator[Unseen]:
    """Yield which modules compute activations themselves.

    Args:
        storages: for each storage that no site keeps, what keeps it.
        total: bytes that the model keeps.

    """
    found: dict[str, Counter[str]] = {}
    paths: dict[str, set[str]] = {}
    for keepers in storages:
        if all(kept.operation in POINTWISE and kept.kind not in OTHER_KINDS for kept in keepers):
            first = next((kept for kept in keepers if kept.operation in CURVED), keepers[0])
            name = starred(first.module)
            found.setdefault(name, Counter())[first.operation] += first.bytes
            paths.setdefault(name, set()).add(first.module)
    for name, sizes in sorted(found.items(), key=lambda item: -item[1].total()):
        if sizes.keys() & CURVED and sizes.total() * SMALL >= total:
            like, *others = paths[name]  # a single path is reported without stars
            named = name if others else like
            yield Unseen(named or "the model", sizes.total(), tuple(name for name, _ in sizes.most_common()))
