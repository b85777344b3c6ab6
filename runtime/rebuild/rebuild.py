"""Rebuilding the outputs of a model: which modules it is done to, and back again."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fitact.errors import UsageError
from fitact.runtime.convert.detect import ActivationSite, activation_sites
from fitact.runtime.convert.gradients import gradient_error
from fitact.runtime.convert.measure import Run, runner, stock, traces
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.norms import linear as layers
from fitact.runtime.records import Conversion, SiteRecord
from fitact.runtime.torch_internals import has_hooks, storage_id, uncompiled

from .found import check_calls, find_calls
from .modules import CONSUMERS, KINDS, REBUILT, Gate, Rebuilding, put_back, swap

PROBE = 64  # elements of what an activation is tried with


class _Wish(NamedTuple):
    path: str
    module: nn.Module
    kind: str
    gate: Gate | None = None


def rebuild(
    model: nn.Module, *, dry_run: bool = False, example_inputs: Any = None, gradients: bool = False
) -> Conversion:
    """Let a model keep no output twice, in place; its gradients stay the same bit for bit.

    Whoever follows an operation keeps its output. What can be computed again from what the operation keeps itself
    is not kept any more: outputs of activations, from their inputs; of gates f(g)·u, from g and u; of LayerNorm
    and RMSNorm, from their inputs; of dropout after one of these, from a mask of a byte an element. Trained linear
    layers that follow, with those of transformers' GPT-2 and peft's adapters, compute it in backward. No matrix
    product is computed again.

    Where anything else keeps an output, as a product with another tensor does, it is kept as ever. An activation
    that is composed of several operations is computed again in backward; if something else reads its input too,
    the gradient of that is summed in another order than stock's, and may differ in its last bit. So may that of a
    float32 weight that several layers or calls share inside one `torch.autocast`. The compiler traces the stock
    model: what it keeps is its own choice. A second derivative raises. Freeze layers and add adapters before.
    `fitact.revert` puts everything back.

    Args:
        model: changed in place; the state and its keys stay.
        dry_run: whether to leave the model as it is and only say what would be done.
        example_inputs: what the model is run with to measure what it keeps, as for `fitact.convert`.
        gradients: whether the gradient of all parameters is compared with stock's, by running the model and its
            backward pass twice with `example_inputs` and real tensors.

    Returns:
        The activations, gates and norms whose outputs are rebuilt; with `example_inputs`, what is kept too.

    Raises:
        UsageError: it is no nn.Module, has nothing to rebuild, or cannot be run; it is then as it was.

    """
    inner: Any = uncompiled(model)
    if not isinstance(inner, nn.Module) or isinstance(inner, torch.jit.ScriptModule):
        raise UsageError(f"expected a model, an nn.Module, got {type(inner).__name__}")
    model = inner
    if gradients and example_inputs is None:
        raise UsageError("gradients=True runs the model: give example_inputs, what the model is called with")
    wishes = _wishes(model)
    refused: list[SiteRecord] = []
    run = None if example_inputs is None else runner(example_inputs)
    if run is not None:
        calls, refused = _calls(model, run, wishes)
        wishes += calls
    records = [
        SiteRecord(wish.path, KINDS[wish.kind], type(wish.module).__name__, REBUILT)
        for wish in wishes
        if wish.kind in KINDS
    ]
    if not records or not any(wish.kind in (*CONSUMERS, "Calls") for wish in wishes):
        hint = "" if run else "; give example_inputs to look at what modules call themselves"
        hint = "".join(f"; {site.name or 'the model'}: {site.reason}" for site in refused[:1]) or hint
        raise UsageError(
            f"nothing to rebuild: there is no activation, gate or norm before a trained linear layer{hint}"
        )
    kept: tuple[int | None, int | None] = None, None
    gradient = None
    if run is not None:
        (before,) = traces(model, run, frozenset(), [stock])
        with _swapped(wishes):
            (after,) = traces(model, run, frozenset(), [stock])
        kept = before.kept, after.kept
        gradient = gradient_error(model, run, frozenset(), lambda _: _swapped(wishes)) if gradients else None
    if not dry_run:
        _swap(wishes)
    return Conversion((*records, *refused), dry_run, *kept, (), gradient)


def _wishes(model: nn.Module) -> list[_Wish]:
    """Return the modules that get another class; what a gate computes itself is not among them."""
    gates = [*_gates(model)]
    inside = {id(wish.module.get_submodule(wish.gate.activation)) for wish in gates if wish.gate is not None}
    return [*gates, *(wish for wish in _producers(model) if id(wish.module) not in inside), *_consumers(model)]


def _calls(model: nn.Module, run: Run, wishes: Sequence[_Wish]) -> tuple[list[_Wish], list[SiteRecord]]:
    """Return the modules whose own calls keep less, and those where that cannot be done, with reasons."""
    with _swapped(wishes):
        found = find_calls(model, run)
    modules = {path: model.get_submodule(path) for path in found}
    reasons = {path: "its forward is not that of its class" for path, one in modules.items() if not _free(one)}

    def made(paths: Sequence[str]) -> list[_Wish]:
        return [_Wish(path, modules[path], "Calls") for path in paths]

    paths = [path for path in found if path not in reasons]
    if paths:
        checked = check_calls(model, run, paths, lambda of: _swapped([*wishes, *made(of)] if of else []))
        paths, reasons = checked.sound, reasons | checked.reasons
    refused = [
        SiteRecord(path, "calls", type(modules[path]).__name__, None, reason) for path, reason in reasons.items()
    ]
    return made(paths), refused


def _swap(wishes: Sequence[_Wish]) -> None:
    for wish in wishes:
        swap(wish.module, wish.kind, wish.gate)


@contextmanager
def _swapped(wishes: Sequence[_Wish]) -> Iterator[None]:
    """Rebuild outputs until the context ends."""
    _swap(wishes)
    try:
        yield
    finally:
        for wish in wishes:
            put_back(wish.module)


def _free(module: nn.Module) -> bool:
    """Whether nothing but a module's class says what it computes."""
    return "forward" not in vars(module) and not isinstance(module, Rebuilding)


def _consumers(model: nn.Module) -> Iterator[_Wish]:
    for path, module in model.named_modules():
        kind = "Linear" if type(module) is nn.Linear else "Conv1D" if layers.is_conv1d(module) else None
        weight = getattr(module, "weight", None)
        if kind and _free(module) and isinstance(weight, Tensor) and weight.requires_grad:
            yield _Wish(path, module, kind)


# ------------------------------------------------------------------------------------------------------- producers


def _producers(model: nn.Module) -> Iterator[_Wish]:
    for site in activation_sites(model):
        held = site.held
        if isinstance(held, nn.Module) and _free(held) and not site.found.converted and not site.found.refusal:
            kind = _keeps(held)
            if kind is not None:
                yield _Wish(site.path, held, kind)
    for path, module in model.named_modules():
        if not _free(module) or has_hooks(module):
            continue
        norm = layers.recognise(module)
        if isinstance(norm, layers.Norm):
            yield _Wish(path, module, "ComposedNorm" if _reads_once(norm) else "Norm")
        elif type(module) is nn.Dropout and not module.inplace:
            yield _Wish(path, module, "Dropout")


def _reads_once(norm: layers.Norm) -> bool:
    """Whether a norm is several operations, and one of them alone reads its input in half precision."""
    if isinstance(norm.module, nn.LayerNorm):
        return False
    twin = copy.deepcopy(norm.module).to("cpu", torch.bfloat16)
    x = torch.ones(1, norm.columns, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        nodes = [twin(x).grad_fn]
    seen: set[Any] = set()
    readers = 0
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        readers += sum(getattr(after, "variable", None) is x for after, _ in node.next_functions)
        nodes += [after for after, _ in node.next_functions]
    return readers == 1


def _keeps(activation: nn.Module) -> str | None:
    """Return the kind of an activation by what it keeps of a few numbers; None if that is its output alone."""
    x = torch.linspace(-3, 3, PROBE).requires_grad_()
    training = activation.training
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False), count_saved(activation) as saved:
            y = activation(x.view_as(x))
    except Exception:  # whatever it needs, it is not a function of a tensor alone
        return None
    finally:
        activation.train(training)
    if not isinstance(y, Tensor) or y.shape != x.shape or storage_id(y) == storage_id(x):
        return None
    if {*saved.storages} == {storage_id(x)}:
        return "Activation"
    return "Composed" if len(saved.storages) > 1 else None


# ----------------------------------------------------------------------------------------------------------- gates


class _Calls(fx.Tracer):
    """Traces which children a module calls, and what else it computes of its input."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into no child."""
        return True

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Take dtypes for equal, as T5 asks for a cast where they are not; other branches cannot be traced."""
        node = obj.node
        if node.target is operator.ne and _is_dtype(node.args[0]):
            return False
        return super().to_bool(obj)


def _is_dtype(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "dtype"


def _gates(model: nn.Module) -> Iterator[_Wish]:
    """Yield the modules that compute down(f(g) · u) and nothing else, whether in training or in evaluation."""
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not _free(module) or own or not 3 <= len([*module.children()]) <= 6:
            continue
        acts = [
            site.attribute
            for site in activation_sites(module)
            if site.parent is module and isinstance(site.held, nn.Module) and _is_gates(site)
        ]
        if len(acts) == 1:
            gates = {_traced(module, acts[0], training) for training in (True, False)}
            gate = gates.pop()
            if gate is not None and not gates and _one_dtype(module, gate):
                yield _Wish(path, module, "GatedMLP", gate)


def _is_gates(site: ActivationSite) -> bool:
    return not (site.found.converted or site.found.refusal or site.found.in_place or has_hooks(site.held))


def _one_dtype(module: nn.Module, gate: Gate) -> bool:
    """Whether the layers of a gate have weights of one dtype: then no cast between them is left out."""
    names = [name for name in (gate.gate, gate.up, gate.down) if name is not None]
    layers_of = [module.get_submodule(name) for name in names]
    return all(map(layers.is_layer, layers_of)) and len({layers.core(one).weight.dtype for one in layers_of}) == 1


def _traced(module: nn.Module, act: str, training: bool) -> Gate | None:
    """Return the gate that a module is in a mode, by what its `forward` calls; None if it does anything else."""
    modes = [(one, one.training) for one in module.modules()]
    try:
        module.train(training)
        graph = fx.GraphModule(module, _Calls().trace(module)).graph
    except Exception:  # it looks at values, or takes more than a tensor
        return None
    finally:
        for one, was in modes:
            one.training = was
    graph.eliminate_dead_code()
    found = _Matched(module, graph, act)
    return found.gate() if {*found.nodes} == {*graph.nodes} else None


class _Matched:
    """A graph that is walked from its output to its input, as long as it is that of a gate."""

    def __init__(self, module: nn.Module, graph: fx.Graph, act: str) -> None:
        self.module, self.act = module, act
        *_, end = graph.nodes
        self.nodes = [end]
        self.names: list[Any] = []
        try:
            self._walk(graph, end.args[0])
        except _OtherError:
            self.nodes = []

    def gate(self) -> Gate:
        return Gate(self.act, *self.names)

    def _walk(self, graph: fx.Graph, down: Any) -> None:
        h = self._called(down)
        drop = None
        if h.op == "call_module":
            drop = h.target
            h = self._called(h, nn.Dropout)
        self._expect(h.op == "call_function" and h.target in (operator.mul, torch.mul) and len(h.args) == 2, h)
        first, second = h.args
        f, u = (first, second) if getattr(first, "target", None) == self.act else (second, first)
        self._expect(isinstance(f, fx.Node) and f.target == self.act and isinstance(u, fx.Node))
        g = self._called(f)
        if g.op == u.op == "call_module":
            x, same = self._called(g), self._called(u)
            self._expect(x is same and x.op == "placeholder", x)
            order = [*graph.nodes]
            self.names = [g.target, u.target, down.target, drop, order.index(u) < order.index(g)]
            return
        for half in (g, u):
            self._expect(half.target is operator.getitem and len(half.args) == 2, half)
        (both, i), (same, k) = g.args, u.args
        self._expect(both is same and {i, k} == {0, 1} and both.target == "chunk", both)
        self._expect({**dict(enumerate(both.args[1:])), **both.kwargs} in ({0: 2, "dim": -1}, {0: 2, 1: -1}))
        x = self._called(both.args[0])
        self._expect(x.op == "placeholder", x)
        self.names = [both.args[0].target, None, down.target, drop, i == 1]

    def _called(self, node: Any, kind: type[nn.Module] = nn.Module) -> Any:
        """Return what a child is called with."""
        self._expect(isinstance(node, fx.Node) and node.op == "call_module" and len(node.args) == 1, node)
        self._expect(not node.kwargs and isinstance(self.module.get_submodule(node.target), kind))
        return node.args[0]

    def _expect(self, holds: bool, node: Any = None) -> None:
        if not holds:
            raise _OtherError
        if node is not None:
            self.nodes.append(node)


class _OtherError(Exception):
    """It is no gate."""
