"""Hooks that decide how each tensor is stored that autograd saves, and a mode that records cheap calls."""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fitact.runtime.kernels import ATTRIBUTE, KernelRecompute
from fitact.runtime.torch_internals import (
    Views,
    any_autocast,
    base_of,
    calls_of,
    changes_arguments,
    copied_from,
    in_functorch_transform,
    is_operator,
    mark_of,
    never_alone,
    next_call,
    set_mark,
    top_hooks,
    tree_leaves,
    version_of,
    version_of_saved,
    without_torch_function,
)

from . import cheap
from .liger import compute_before_overwriting, is_known, liger_call
from .recompute import PLAIN, Computed, Reading, Recompute, Unsuitable
from .storage import (
    Bits,
    Hooks,
    Made,
    Mark,
    Shape,
    Small,
    Stored,
    held,
    is_dense,
    is_leaf,
    is_parameter,
    marked,
    quietly,
)

Function = Callable[..., Any]
Call = tuple[Function, Sequence[Any]]
# What a kind of ReLU saved, weakly, the mark on its memory, the function, and what others may read yet, weakly.
Kinked = tuple[Callable[[], Stored | None], Mark, Function, Sequence[Callable[[], Tensor | None]]]
Rule = Callable[["Capture", Function, Sequence[Any], dict[str, Any]], Any]
FEW = 64  # elements: a mask of fewer is stored as it is
INTEGERS = torch.int8, torch.int16, torch.int32
# Called with each tensor that autograd saves, and how it is stored, by contexts that are made while this is set.
observer: ContextVar[Callable[[Tensor, Stored | Reading], None] | None] = ContextVar("observer", default=None)


@contextmanager
def observing(where: Callable[[Tensor], Any]) -> Iterator[list[tuple[Any, Callable[[], str]]]]:
    """Record how the tensors that autograd saves in contexts are stored, while this context is open.

    Yields:
        For each tensor what `where` returned, and a function that says how it is stored, to be called in the end.

    """
    seen: list[tuple[Any, Callable[[], str]]] = []
    token = observer.set(lambda tensor, saved: seen.append((where(tensor), partial(_how, saved))))
    try:
        yield seen
    finally:
        observer.reset(token)


def _how(saved: Stored | Reading) -> str:
    stored = saved.instead or saved if isinstance(saved, Stored) else saved
    made: Made = stored.computed if isinstance(stored, Reading) else stored
    return "recomputed" if made.replaced else made.how


class Capture(TorchFunctionMode):
    """The hooks and the mode of one context that was entered.

    The mode sees each call of a function of PyTorch, and the hooks each tensor that autograd saves during it. What
    a cheap call returns carries how to recompute it. Inside of other hooks, such as those of a checkpoint,
    the context does nothing: only the innermost hooks are called.
    """

    sees_calls = True  # not the hooks alone
    recompute_attention = False

    def __init__(self) -> None:
        super().__init__()
        outer = top_hooks()
        owner = getattr(outer[0], "__self__", None) if outer else None
        self.hooks: Hooks | None = owner.hooks if isinstance(owner, Capture) else Hooks(*outer) if outer else None
        self._observer = observer.get()
        self._pack = self.pack if self._observer is None else self._observed
        self._context = saved_tensors_hooks(self._pack, unpack)
        self._first_call = self._call = next_call()
        self.current: Call | None = None
        self.undecided: list[tuple[Stored, torch.UntypedStorage]] | None = None
        self._changed: Tensor | None = None
        self.autocast = True
        self.masks: list[tuple[Bits, Mark]] | None = None
        self.p = 0.0
        self.holding: weakref.WeakSet[Recompute] | None = None  # what refers to tensors that nothing else stores
        self.kinked: list[Kinked] = []

    def _observed(self, tensor: Tensor) -> Stored | Reading:
        stored = self.pack(tensor)
        assert self._observer is not None
        self._observer(tensor, stored)
        return stored

    @property
    def outside(self) -> bool:
        """Whether the user's hooks store what is saved: PyTorch sees no change in place then."""
        return self.hooks is not None and not self.hooks.own

    def __enter__(self) -> Any:
        self._context.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        try:
            self.store_slopes()
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._context.__exit__(*error)
            del self._pack, self._context  # which refer to this object: what it holds is freed with it
            for recompute in self.holding or ():
                recompute.let_go()

    def pause(self) -> bool:
        """Let autograd save tensors as they are, if these hooks are the innermost; returns whether they are.

        Changes in place are still seen.
        """
        innermost = (top_hooks() or (None,))[0] is self._pack
        if innermost:
            self._context.__exit__(None, None, None)
        return innermost

    def resume(self) -> None:
        """End a pause."""
        self._context.__enter__()

    @contextmanager
    def again(self) -> Iterator[None]:
        """See calls within a call, too."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------------------------------------- calls

    @never_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule: Any = RULES.get(func, ...)
        if rule is ... and not torch.compiler.is_compiling():  # PyTorch 2.9 traces no `__missing__`
            rule = RULES[func]
        idle = rule is None and "liger_kernel" not in sys.modules  # what Liger returns may be read first by a view
        if idle or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        hooks = top_hooks() if torch.is_grad_enabled() else None
        if not hooks or hooks[0] is not self._pack:
            inner = getattr(hooks[0], "__self__", None) if hooks else None
            if not (isinstance(inner, Capture) and inner.sees_calls):  # that has done so
                change(written(func, args, kwargs))
            return func(*args, **kwargs)
        self.autocast = any_autocast()
        if self.autocast:
            self._call = next_call()
        if "liger_kernel" in sys.modules:
            self._record_liger(args)
        changes = kwargs.get("out") is not None and RULES[CHANGING]
        return (changes or rule or Capture.plain)(self, func, args, kwargs)

    def call(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """Make a call as if the model had made it."""
        rule = RULES[func]
        return func(*args, **kwargs) if rule is None else rule(self, func, args, kwargs)

    def plain(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any], instead: Any = None) -> Any:
        """Make a call whose output is not recomputed; or another call in its place, if one is given."""
        self.current = call_of(func, args, kwargs)
        try:
            return func(*args, **kwargs) if instead is None else instead()
        finally:
            self.current = None

    def writing(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call that may change some of its arguments in place."""
        change(written(func, args, kwargs))
        return self.plain(func, args, kwargs)

    def cheap(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a cheap call; its output is recomputed by the same function."""
        output, undecided = self.made(func, args, kwargs)
        recompute = None
        if is_plain(output) and output.requires_grad and output.numel() != 1:  # a number is stored
            recompute = set_recompute(self, output, func, args, kwargs)
        call = call_of(func, args, kwargs) if undecided else None
        for stored, storage in undecided:
            own = recompute if recompute is not None and storage is output.untyped_storage() else None
            computed = self.recomputed(own, output, call)
            if computed is not None:
                stored.recompute_instead(self.computed(computed, output, call))
                continue
            settled = self.settle(stored, storage, output)
            if own is not None:
                own.wait(settled)
                mark_of(storage).recompute = None
        return output

    def made(
        self, func: Function, args: Sequence[Any], kwargs: dict[str, Any], changed: Tensor | None = None
    ) -> tuple[Any, list[tuple[Stored, torch.UntypedStorage]]]:
        """Make a call, and return its output, and what it saved that is no argument, or one that it changed."""
        self.current, self._changed = call_of(func, args, kwargs), changed
        self._changed_at = 0 if changed is None else version_of(changed)
        undecided = self.undecided = []
        try:
            return func(*args, **kwargs), undecided
        finally:
            self.current = self.undecided = self._changed = None

    def recomputed(self, recompute: Recompute | None, value: Tensor, call: Call | None) -> Computed | None:
        """Return what computes a value that a call saves; None if it has to be stored."""
        if recompute is None or not self.is_near_enough(recompute, call, value):
            return None
        return recompute.store(self.store)

    def computed(self, computed: Computed | Stored, value: Tensor, call: Call | None) -> Reading | Stored:
        """Return how autograd gets a value that a call saves and backward computes."""
        return Reading(computed, value, self.outside)

    def settle(self, stored: Stored, storage: torch.UntypedStorage, output: Any) -> Stored:
        """Store what could not be recomputed, after a call that returned the output; returns what is stored."""
        mark_of(storage).add(stored.settle())
        return stored

    def _record_liger(self, args: Iterable[Any]) -> None:
        """Record how the outputs of Liger's functions among the arguments of a call are recomputed."""
        for x in args:
            if isinstance(x, list | tuple):
                self._record_liger(x)
            elif isinstance(x, Tensor) and is_plain(x) and is_known(x) and not version_of_saved(x):
                mark, node = marked(x, self.hooks), x.grad_fn
                if mark.recompute is None and not mark.has(0) and calls_of(node) >= self._first_call:
                    call = liger_call(x)
                    recompute = None if call is None else set_recompute(self, x, *call, {})
                    if recompute is not None:
                        compute_before_overwriting(node, recompute)

    # ----------------------------------------------------------------------------------------------- saved tensors

    def pack(self, tensor: Tensor) -> Stored | Reading:
        """Return how a tensor is stored that autograd saves."""
        if is_parameter(tensor) or not is_plain(tensor):
            return self._stored(tensor)
        if self.current and self.current[0] in cheap.SHAPED and _is_a_shape(tensor, *self.current):
            return Shape(tensor, self.hooks, self.current[0] not in cheap.ADDING)
        grows = tensor.requires_grad
        storage, version = tensor.untyped_storage(), version_of_saved(tensor)
        mark = marked(tensor, self.hooks, storage)
        if not mark.is_of(tensor, version):
            return self._stored(tensor)
        stored = self.same(tensor, mark, version) if mark.known else None
        if stored is not None:
            stored.ours = False
            stored.readers += 1
            stored.last = next_call() - 1
            return self.computed(stored, tensor, self.current) if stored.replaced else stored
        if not grows and tensor.numel() < FEW:
            stored = self._stored(tensor)
            mark.add(stored)
            return stored
        recompute = mark.recompute
        if recompute is None and (self.autocast or (grows and self.current and self.current[0] in cheap.COPYING)):
            recompute = self._copy(tensor)
        if recompute is None and (offered := getattr(storage, ATTRIBUTE, None)) is not None:
            recompute = self._offered(tensor, offered)
        if recompute is not None and recompute.version == version and not mark.has(version):
            computed = self.recomputed(recompute, tensor, self.current)
            if computed is not None:
                return self.computed(computed, tensor, self.current)
        if not grows:
            with without_torch_function():
                stored = self._in_fewer_bytes(tensor, mark)
        if stored is None:
            if self.undecided is not None and not self._is_argument(tensor):
                stored = Stored(tensor, self.hooks)
                stored.first = next_call() - 1
                self.undecided.append((stored, storage))
                return stored
            return self.store(tensor, mark, grows and not tensor.is_leaf)
        mark.add(stored)
        return stored

    def same(self, tensor: Tensor, mark: Mark, version: int) -> Stored | None:
        """Return how a tensor is stored already, by its mark; None if it is not."""
        return mark.same(tensor, version)

    def store(self, tensor: Tensor, mark: Mark, grows: bool) -> Stored:
        """Store a tensor, and say so on the mark of its memory.

        Args:
            tensor: what autograd saves or a recomputation reads.
            mark: of its memory.
            grows: whether it has a gradient and is no parameter or input of the user.

        """
        for other in mark.alive(version_of_saved(tensor)) if mark.known else ():
            other.stays = True  # to free it would free nothing: this is the same memory
        stored = self.added(tensor, mark, grows)
        recompute: Recompute | None = mark.recompute
        if recompute is not None and recompute.version == stored.version:
            recompute.wait(stored)
            mark.recompute = None  # which may hold what it reads
        if mark.waiting:
            self._replace_waiting(mark)
        return stored

    def added(self, tensor: Tensor, mark: Mark, grows: bool) -> Stored:
        """Store a tensor as `store` does, whatever waits for it."""
        stored = self._stored(tensor)
        mark.add(stored)
        return stored

    def _replace_waiting(self, mark: Mark) -> None:
        """Recompute what waited for a memory to be stored.

        What is replaced is computed from nothing that was itself replaced: backward would nest too deeply.
        """
        waiting, mark.waiting = mark.waiting, ()
        for ref in waiting:
            stored = ref()
            if stored is None or stored.replaced or stored.stays:
                continue
            if not stored.recompute.is_free():
                mark.waiting = (*mark.waiting, ref)
                continue
            leaves = list(stored.recompute.leaves())
            if any(leaf.replaced for leaf in leaves) or not self.is_as_near(stored, leaves):
                continue
            computed = stored.recompute.store(self.store)
            if computed is not None:
                stored.replace(computed)
                for leaf in leaves:
                    leaf.stays = True

    def store_slopes(self) -> None:
        """Store slopes in place of what kinds of ReLU saved and nothing else has read, or can any more."""
        kinked, self.kinked = self.kinked, []
        for entry in kinked:
            ref, mark, func, tensors = entry
            stored = ref()
            if stored is not None and not stored.spare:
                self._replace_waiting(mark)
            elif any(tensor() is not None for tensor in tensors):
                self.kinked.append(entry)
            elif stored is not None:
                stored.keep_slope(partial(slope_of, func=func))

    def is_near_enough(self, recompute: Recompute, call: Call | None, tensor: Tensor) -> bool:
        """Return whether a tensor may be recomputed so for the call that saves it."""
        return True

    def is_as_near(self, stored: Stored, leaves: Sequence[Stored]) -> bool:
        """Return whether a tensor may be computed from others in place of what is stored of it."""
        return True

    def _stored(self, tensor: Tensor) -> Stored:
        if self.hooks is None or (self.hooks.own and is_leaf(tensor)):
            return Stored(tensor, None)
        stored = Stored(tensor, self.hooks)
        if self.current is None:
            stored.first = 0  # a function of the user's, whose node is older than those that its forward records
        return stored.settle()

    def _is_argument(self, tensor: Tensor) -> bool:
        assert self.current is not None
        if tensor is self._changed:  # before the change, or its result
            return version_of_saved(tensor) == self._changed_at
        for argument in self.current[1]:
            if tensor is argument or (
                type(argument) in (list, tuple) and any(tensor is part for part in argument)
            ):
                return True
        return False

    def _in_fewer_bytes(self, tensor: Tensor, mark: Mark) -> Stored | None:
        """Return a mask in bits, or indices in fewer bytes; None for other tensors."""
        if self.masks is not None:
            bits = Bits(tensor, self.hooks, None if tensor.dtype == torch.bool else self.p)
            self.masks.append((bits, mark))
            return bits
        if tensor.dtype == torch.bool and is_dense(tensor):
            return Bits(tensor, self.hooks)
        if tensor.dtype == torch.int64 and self.current is not None:
            function, arguments = self.current
            sizes = [argument.shape for argument in arguments if isinstance(argument, Tensor)]
            if function in cheap.POOLING:
                largest = max(math.prod(shape[-cheap.POOLING[function] :]) for shape in sizes)
            elif function in cheap.INDEXING_FUNCTIONS and not (
                function in cheap.EXTREMA and self._is_argument(tensor)
            ):
                largest = max(size for shape in sizes for size in shape)
            else:
                return None
            dtype = next((dtype for dtype in INTEGERS if largest <= torch.iinfo(dtype).max + 1), None)
            if dtype is not None and tensor.numel() * dtype.itemsize < tensor.untyped_storage().nbytes():
                return Small(tensor, self.hooks, dtype)
        return None

    def _offered(self, tensor: Tensor, offered: KernelRecompute) -> Recompute | None:
        """Return how the output of one of fitact's own ops is recomputed from what the op saves."""
        if offered.version != version_of_saved(tensor):
            return None
        base = base_of(tensor)
        return set_recompute(self, tensor if base is None else base, offered.function, offered.state, {})

    def _copy(self, tensor: Tensor) -> Recompute | None:
        """Return how to recompute a copy that the call made of an argument, or autocast, also of a parameter.

        The copy may have another dtype, and its numbers another order in memory.
        """
        base = base_of(tensor)
        copy = tensor if base is None else base
        if not tensor.requires_grad:
            frozen = self._frozen(copy)
            return None if frozen is None else set_recompute(self, copy, Tensor.to, (frozen, copy.dtype), {})
        sources = [*copied_from(copy)]
        if not sources:
            return None
        leaves = tree_leaves(self.current[1]) if self.current else []
        arguments = [each for each in leaves if isinstance(each, Tensor)]
        if any(copy is each or copy is base_of(each) for each in arguments):
            return None
        for node, number, views in sources:
            leaf = getattr(node, "variable", None)
            if leaf is not None and calls_of(copy.grad_fn) < self._call:
                return None  # made before this call: the parameter may have been changed since
            for each in arguments if leaf is None else (leaf,):
                own = each is leaf or (each.grad_fn is node and each.output_nr == number)
                if own and (each.numel(), each.device) == (copy.numel(), copy.device):
                    return set_recompute(self, copy, _copied, (each, copy.dtype, views, copy.shape), {})
        return None

    def _frozen(self, copy: Tensor) -> Tensor | None:
        """Return the frozen weight that a product reads a copy of; None if it is none."""
        if self.current is None or self.current[0] not in cheap.PRODUCTS:
            return None
        arguments = (each for each in self.current[1] if isinstance(each, Tensor) and not each.requires_grad)
        like = [each for each in arguments if each.shape == copy.shape]
        wide = len(like) == 1 and is_parameter(like[0]) and like[0].dtype == torch.float32
        return like[0] if wide and copy.dtype in (torch.bfloat16, torch.float16) else None


def slope_of(value: Tensor, func: Function, args: Sequence[Any] = ()) -> tuple[Tensor, float]:
    """Return a mask and a number in place of what a kind of ReLU saves.

    Backward gets the number where the mask is true, else 0: it asks only between which kinks the value is. A ReLU
    takes NaN for one above 0.
    """
    with quietly():
        if func in cheap.RELUS:
            return (value <= 0).logical_not_(), 1.0
        if func in cheap.LEAKY:
            return value > 0, 1.0
        low, high = args[1:3] if func is F.hardtanh else (0.0, 6.0)
        outside = (value <= low) | (value >= high)
        return (outside, 2 * high) if low < 0 < high else (outside.logical_not_(), (low + high) / 2)


def unpack(saved: Stored | Reading) -> Tensor:
    """Return what autograd saved."""
    if saved.last < held.first:
        held.free_passed(saved.last)
    return saved.unpack()


def _is_a_shape(tensor: Tensor, func: Function, args: Sequence[Any]) -> bool:
    """Return whether backward reads no number of what a function of SHAPED saves."""
    if func not in cheap.CONVOLUTIONS:
        return tensor.is_floating_point()
    trained = [each for each in args if isinstance(each, Tensor) and each.dim() > 1 and each.requires_grad]
    return tensor.requires_grad and len(trained) == 1  # the gradient of one is a product of the others


def _copied(x: Tensor, dtype: torch.dtype, views: Views, shape: torch.Size) -> Tensor:
    for method, args in views:
        x = getattr(x, method)(*args)
    return x.to(dtype).reshape(shape)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor's numbers are those in its memory, dense or a view, and it is of no user's class."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_neg() or tensor.is_nested)


def set_recompute(
    capture: Capture,
    output: Tensor,
    function: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    version: int = 0,
) -> Recompute | None:
    """Return how to recompute a tensor, None if it has no memory of its own; record it there if it has its value.

    Args:
        capture: where that is.
        output: what was computed.
        function: pure, of the arguments.
        args: arguments, among them tensors.
        kwargs: arguments by name.
        version: how often the tensor will be changed in place until the function gives its value.

    """
    if output.is_complex():  # views of its memory may be real, and layouts have no dtype
        return None
    with without_torch_function():
        try:
            # autocast never changes a cast, nor what is computed in place
            autocast = capture.autocast and not version and function not in (Tensor.to, _copied)
            recompute = Recompute(function, args, kwargs, output, capture.hooks, autocast, version)
        except Unsuitable:
            return None
        if recompute.holds:
            capture.holding = capture.holding or weakref.WeakSet()
            capture.holding.add(recompute)
        if not version:
            marked(output, capture.hooks).recompute = recompute
        return recompute


def call_of(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return a call with all its arguments, those by name last, as PyTorch hands them to modes."""
    return func, (*args, *kwargs.values()) if kwargs else args


@cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(inspect.unwrap(func).__code__.co_varnames)


def named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function in Python by their names; PyTorch hands all of them to modes."""
    return {**dict(zip(_names(func), args, strict=False)), **kwargs}


def written(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return what a call changes in place: `out`, its first argument, an operator's any, or by one of FLAGS."""
    tensors: Any = ()
    if in_functorch_transform():  # whose tensors have no memory of their own
        return ()
    if kwargs.get("out") is not None:
        tensors = kwargs["out"]
    elif func in CHANGES and is_operator(func):
        tensors = *args, *kwargs.values()
    elif func in CHANGES:
        tensors = args[0] if args else [kwargs[name] for name in CHANGED if name in kwargs]
    elif (flag := FLAGS.get(func)) is not None:
        given = named(func, args, kwargs)
        if given.get(flag):
            tensors = [given.get(name) for name in WRITTEN[flag]]
    return tensors if isinstance(tensors, list | tuple) else (tensors,)


def change(tensors: Sequence[Any]) -> None:
    """Copy what something is recomputed from, and know no more of a memory: tensors are about to be changed."""
    for tensor in tensors:
        mark: Mark | None = mark_of(tensor.untyped_storage()) if is_plain(tensor) else None
        if mark is not None:
            for stored in mark.needed():
                with quietly():
                    stored.copy(tensor.untyped_storage())
            set_mark(tensor.untyped_storage(), mark.changed(version_of(tensor)))


CHANGED = "input", "self", "tensor"
CHANGING = Tensor.add_  # whose rule is that of all functions that change a tensor in place
CHANGES: set[Any] = set()  # these functions, as far as they were met
# Functions that change something in place if an argument says so, by its name, and what that is.
FLAGS: dict[Any, str] = {
    each: "inplace"
    for function in filter(inspect.isfunction, vars(F).values())
    for each in (function, inspect.unwrap(function))
    if "inplace" in _names(function)
}
FLAGS |= {F.batch_norm: "training", F.instance_norm: "use_input_stats"}
FLAGS |= {F.embedding: "max_norm", F.embedding_bag: "max_norm"}
_STATISTICS = "running_mean", "running_var"  # PyTorch does not count that it changes these
WRITTEN = {"inplace": ("input",), "max_norm": ("weight",), "training": _STATISTICS, "use_input_stats": _STATISTICS}
# Functions that save nothing and change no number, such as attributes and views.
IDLE = """
    __get__ size dim numel stride is_floating_point detach detach_ requires_grad_ view view_as expand expand_as
    transpose permute movedim unsqueeze squeeze unbind chunk split narrow
"""


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in (*cheap.OPERATORS.split(), *cheap.IN_PLACE)


class _Rules(dict[Any, Rule | None]):
    """The rule of each function; None for IDLE ones."""

    def __missing__(self, func: Any) -> Rule | None:
        name = getattr(func, "__name__", "").partition(".")[0]  # what follows is an operator's overload
        rule: Rule | None = Capture.writing if func in FLAGS else Capture.plain
        if name in IDLE.split():
            rule = None
        elif changes_arguments(func) if is_operator(func) else _is_in_place(name):
            rule = self[CHANGING]
            CHANGES.add(func)
        self[func] = rule
        return rule


RULES = _Rules()
