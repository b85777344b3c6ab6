"""Functions that are computed again for their gradients, and activations of rebuilt inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from fitact.runtime.autocast import active_autocast
from fitact.runtime.recipes import note
from fitact.runtime.torch_internals import never_alone

from .recipes import Function, Source, applied, source, use

READS = 8  # how often a function that is computed again may read an input


def once() -> None:
    """Raise where a second derivative is asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError("a rebuilt output has no second derivative: call backward without create_graph")


def autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the autocast that is on now."""
    dtype = active_autocast(device)
    return nullcontext if dtype is None else lambda: torch.autocast(device, dtype)


class _Start(torch.autograd.Function):
    """A tensor as the start of a graph, which does not hold it as a leaf would."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("the gradient is taken before it gets here")


def started(x: Tensor) -> Tensor:
    """Return a detached tensor as the start of a graph, which does not hold it as a leaf would."""
    anchor = torch.empty(0, requires_grad=True)
    begun: Tensor = applied(_Start, anchor, x)
    return begun


class _Power(torch.autograd.Function):
    """A power; its derivative has PyTorch's numbers, but takes one tensor instead of three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exponent: float) -> Tensor:
        ctx.exponent = exponent
        ctx.save_for_backward(x)
        return x.pow(exponent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x.pow(ctx.exponent - 1).mul_(ctx.exponent).mul_(grads[0]), None


class _Powers(TorchFunctionMode):
    """A context in which powers are differentiated so, except under autocast, which casts them."""

    NAMES = (torch.pow, Tensor.pow, Tensor.__pow__)

    @never_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.NAMES and len(args) == 2 and not kwargs and type(args[1]) in (int, float) and args[1]:
            x, exponent = args
            if x.requires_grad and x.is_floating_point() and not active_autocast(x.device.type):
                return applied(_Power, x, exponent)
        return func(*args, **(kwargs or {}))


@contextmanager
def differentiable(autocast: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter a context in which a function is computed again for its derivative, in the autocast that it ran in."""
    with torch.enable_grad(), autocast(), _Powers():
        yield


class Reads:
    """The gradients of a function's inputs, one for each time that it reads one, in the order in which they come.

    PyTorch adds each to what an input's other readers have given so far. To add their sum instead would round
    otherwise.
    """

    def __init__(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """Look at a graph before its backward pass.

        Args:
            output: the function's.
            inputs: detached; those that require a gradient are leaves of the graph.

        """
        self.end = get_gradient_edge(output)
        self.inputs = [one for one in inputs if one.requires_grad]
        self.found: dict[int, list[Tensor]] = {id(one): [] for one in inputs}
        for node, places in readers(self.end.node, self.inputs):
            node.register_hook(partial(_take, self.found, places))

    def gradients(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return READS gradients of each input, None where it is read less often.

        If it is read more often, the first ones are added: that is right to the last bit if nothing reads it after
        the function.

        Args:
            grads: the output's.

        """
        if self.inputs:
            torch.autograd.grad(self.end, self.inputs, grads, allow_unused=True)
        gradients: list[Tensor | None] = []
        for found in self.found.values():
            while len(found) > READS:
                found[:2] = [found[0] + found[1]]
            gradients += [*found, *[None] * (READS - len(found))]
        return gradients


def _take(
    found: dict[int, list[Tensor]], places: dict[int, int], given: Sequence[Tensor | None], _: Any
) -> tuple[Tensor | None, ...]:
    """Take the gradients that a node has for inputs, and let the others go on."""
    for place, key in places.items():
        gradient = given[place]
        if gradient is not None:
            found[key].append(gradient)
    return tuple(None if place in places else one for place, one in enumerate(given))


def readers(end: Any, inputs: Sequence[Tensor]) -> Iterator[tuple[Any, dict[int, int]]]:
    """Yield the nodes of a graph that read inputs, with the identity of the input behind each such edge.

    Args:
        end: the node from which the graph is walked.
        inputs: leaves.

    """
    wanted = {id(one) for one in inputs}
    nodes, seen = [end], {end}
    while nodes:
        node = nodes.pop()
        places = {}
        for place, (after, _) in enumerate(node.next_functions):
            leaf = id(getattr(after, "variable", None))
            if leaf in wanted:
                places[place] = leaf
            elif after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
        if places:
            yield node, places


def count_reads(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return how often a function reads x, which is detached: how many gradients autograd would add."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)  # before PyTorch 2.13, a node of an `autograd.Function` lives no longer than its output
    return sum(len(places) for _, places in readers(y.grad_fn, [leaf]))


# ------------------------------------------------------------------------- activations of what is rebuilt


class Plain:
    """A function as it runs in the autocast that is on now, without autograd."""

    def __init__(self, function: Function, device: str) -> None:
        self.function, self.autocast = function, autocast(device)

    def use(self) -> None:
        """Tell the function, if it wants to know, that a layer will call it once in each backward pass."""
        use(self.function)

    def __call__(self, *state: Tensor) -> Tensor:
        """Return the function of tensors."""
        with torch.no_grad(), self.autocast():
            return self.function(*state)


class _Chained(torch.autograd.Function):
    """f(x), perhaps written over x; x is rebuilt for the derivative. `rest`: f's parameters, then the state."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Function, function: Function, rebuild: Function, count: int, *rest: Tensor
    ) -> Tensor:
        ctx.function, ctx.rebuild, ctx.count, ctx.autocast = function, rebuild, count, autocast(x.device.type)
        ctx.save_for_backward(*rest)
        y = run(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        state = ctx.saved_tensors
        x = ctx.rebuild(*state[ctx.count :]).detach()
        wants = ctx.needs_input_grad[5:][: ctx.count]
        with differentiable(ctx.autocast):
            x = started(x)
            own = [one.detach().requires_grad_(wanted) for one, wanted in zip(state, wants, strict=False)]
            start, end = get_gradient_edge(x), get_gradient_edge(ctx.function(x, *own))
        del x  # unless the function keeps it
        trained = [one for one in own if one.requires_grad]
        dx, *found = torch.autograd.grad(end, [start, *trained], grads, allow_unused=True)
        gradients = iter(found)
        by_own = [next(gradients) if wanted else None for wanted in wants]
        return dx, None, None, None, None, *by_own, *(None for _ in state[ctx.count :])


class Of:
    """A function of what is rebuilt; the state begins with its `count` other arguments."""

    def __init__(self, function: Function, found: Source, count: int = 0) -> None:
        self.function, self.rebuild, self.count = function, found.function, count

    def use(self) -> None:
        """Tell what is rebuilt that a layer will call this once in each backward pass."""
        use(self.rebuild)

    def __call__(self, *state: Tensor) -> Tensor:
        """Return the function of what is rebuilt and of its other arguments."""
        return self.function(self.rebuild(*state[self.count :]), *state[: self.count])


def chained(
    run: Function, function: Function, x: Tensor, exact: bool = True, parameters: Sequence[Tensor] = ()
) -> Tensor | None:
    """Return f(x), which keeps what x is rebuilt from, and is itself rebuilt from that; None if x cannot be.

    Args:
        run: f, which may overwrite its argument and return that.
        function: the same f of x and its parameters, which does not.
        x: its argument.
        exact: whether to keep an argument that would not be rebuilt bit for bit.
        parameters: f's.

    """
    found = source(x, exact) if torch.is_grad_enabled() else None
    if found is None:
        return None
    use(found.function)
    use(function)
    count, state = len(parameters), (*parameters, *found.state)
    y: Tensor = applied(_Chained, x, run, function, found.function, count, *state)
    return note(y, Of(Plain(function, x.device.type), found, count), *state, exact=found.exact)
