"""Finding the modules of a model whose outputs can be rebuilt, and the layers that then keep less."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fitact.runtime.convert.detect import ActivationSite, activation_sites, own_errors, stated_errors
from fitact.runtime.convert.measure import check_initialised
from fitact.runtime.learned.function import LearnedModule
from fitact.runtime.norms import linear as layers
from fitact.runtime.records import SiteRecord
from fitact.runtime.restore import Run, has_no_values, unchanged
from fitact.runtime.torch_internals import has_hooks
from fitact.runtime.wrappers import is_exact_gate
from fitact.text import starred

from .codes import AnyCodes, Gate, OwnCodes
from .convolution import CONVOLUTIONS
from .found import check_calls, find_calls, is_composed, kind_of, learned_kind
from .modules import KINDS, REBUILT, Rebuilding, put_back, swap

CODING = ("Learned", "ComposedLearned", "Norm", "ComposedNorm")  # these may keep codes, as gates do
NOTED = ("Activation", "Chained", "Learned", "Norm", "BatchNorm", "BatchNormAct")  # gain only with a layer
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONSUMERS_OF = {nn.Linear: "Linear"} | dict.fromkeys(CONVOLUTIONS, "Convolution")


@dataclass(frozen=True)
class Swap:
    """A module that gets another class, so that it keeps less.

    Attributes:
        path: its path in the model.
        module: the module.
        kind: the new class, a key of CLASSES.
        gate: what its children are, if it is a gated MLP.
        codes: those that a gate, an activation with learned numbers or a norm keeps; None to keep their tensors.
        exact: whether gradients stay stock's; if not, codes are kept for the output of a coded activation.

    """

    path: str
    module: nn.Module
    kind: str
    gate: Gate | None = None
    codes: AnyCodes | None = None
    exact: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the module and of the activation of its gate."""
        if self.gate is None:
            return (self.path,)
        return self.path, ".".join(filter(None, (self.path, self.gate.activation)))

    @property
    def activation(self) -> nn.Module:
        """The module, or the activation of its gate."""
        return self.module if self.gate is None else self.module.get_submodule(self.gate.activation)

    @property
    def may_code(self) -> bool:
        """Whether it may be given codes; other activations are replaced by others that keep some."""
        return (self.gate is not None and not self.given) or self.kind in CODING

    @property
    def given(self) -> bool:
        """Whether it is a gate whose codes the user has chosen."""
        return isinstance(self.codes, OwnCodes)

    @property
    def record(self) -> SiteRecord | None:
        """The record of a site whose output is rebuilt; None for layers that keep less and for dropout."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return None
        names = () if self.codes is None else self.codes.names
        errors = [stated_errors(name, what) for name, what in zip(names, ("value", "u"), strict=False)]
        if isinstance(self.codes, OwnCodes):
            errors = [own_errors(self.codes.gate)]
        label = ", ".join(names) or REBUILT
        return SiteRecord(self.path, kind, type(self.module).__name__, label, "; ".join(filter(None, errors)))


def swaps(
    model: nn.Module,
    run: Run | None = None,
    wanted: Callable[[Swap], bool] = lambda _: True,
    checked: bool = True,
) -> tuple[list[Swap], list[SiteRecord]]:
    """Find the modules that get another class.

    Args:
        model: the model, which is not changed.
        run: runs it, to find and check what modules compute in their own `forward`; None to leave this alone.
        wanted: whether the outputs of an activation, a gate, a norm or a module's own calls are to be rebuilt.
        checked: whether to leave alone what modules compute in their own `forward` where the model has no values
            to check it with.

    Returns:
        The modules; none if the model has no output to rebuild, or no trained layer that would keep one. The
        activation of a gate is not among them. Then records of the modules whose calls cannot be rebuilt.

    Raises:
        UsageError: the model cannot be run, or has parameters that are not initialised yet.

    """
    check_initialised(model)
    gates = [one for one in gated(model) if wanted(one)]
    inside = {id(one.activation) for one in gates}
    producers = [one for one in _producers(model) if id(one.module) not in inside]
    producers = [*gates, *(one for one in producers if one.record is None or wanted(one))]
    consumers = [*_consumers(model)]
    there = [*(one.module for one in consumers), *filter(_rebuilds, model.modules())]
    trained = any(parameter.requires_grad for one in there for parameter in one.parameters(recurse=False))
    found = [*producers, *consumers]
    calls, refused = ([], []) if run is None else _calls(model, run, found, wanted, checked)
    noting = any(isinstance(one, LearnedModule) for one in model.modules())  # with nothing changed in them
    used = calls or (trained and (noting or any(one.record for one in producers)))
    return [*found, *calls] if used else [], refused


def _calls(
    model: nn.Module, run: Run, others: Sequence[Swap], wanted: Callable[[Swap], bool], checked: bool
) -> tuple[list[Swap], list[SiteRecord]]:
    """Return the modules whose own calls keep less, and records of those where that cannot be done."""
    with swapped(others):  # modules whose forward is replaced already are left alone, with what their hooks call
        paths = [path for path in find_calls(model, run) if not isinstance(model.get_submodule(path), Rebuilding)]
    found = [one for one in (Swap(path, model.get_submodule(path), "Calls") for path in paths) if wanted(one)]
    reasons = {one.path: "its forward is not that of its class" for one in found if not _free(one.module)}
    free = {one.path: one for one in found if one.path not in reasons}
    sound: Sequence[str] = ()
    if free and not checked and has_no_values(model):
        sound = [*free]
    elif free:
        found_sound = check_calls(
            model, run, [*free], lambda of: swapped([*others, *(free[path] for path in of)] if of else [])
        )
        sound, reasons = found_sound.sound, reasons | found_sound.reasons
    refused = [
        SiteRecord(one.path, "calls", type(one.module).__name__, None, reasons[one.path])
        for one in found
        if one.path in reasons
    ]
    return [free[path] for path in sound], refused


def paying(found: Sequence[Swap], read: Collection[str]) -> list[Swap]:
    """Return the modules without activations and norms that keep no less: no layer rebuilds their outputs.

    Args:
        found: the modules.
        read: paths of modules whose outputs a layer rebuilt in a run; the run may have missed others like them.

    """
    likes = {_like(one) for one in found if one.path in read}
    return [one for one in found if one.kind not in NOTED or _like(one) in likes]


def likes(found: Sequence[Swap], without: Container[nn.Module] = ()) -> list[tuple[str, str]]:
    """Return what modules that may code have in common with others like them, if none of these is left out."""
    left = {_like(one) for one in found if one.may_code and one.activation in without}
    return [*dict.fromkeys(like for one in found if one.may_code and (like := _like(one)) not in left)]


def coded(
    found: Sequence[Swap],
    codes: Callable[[nn.Module], AnyCodes | None],
    like: tuple[str, str] | None = None,
) -> list[Swap]:
    """Let gates, activations with learned numbers, and norms keep codes.

    Args:
        found: the modules.
        codes: of the activation, of that of a gate, or of a norm; None where there are none.
        like: as from `likes`; None for all.

    """
    return [
        replace(one, codes=codes(one.activation) or one.codes)
        if one.may_code and like in (None, _like(one))
        else one
        for one in found
    ]


def _like(one: Swap) -> tuple[str, str]:
    """Return what a module has in common with the same module in other layers."""
    return type(one.module).__name__, starred(one.path)


def records(found: Sequence[Swap]) -> Iterator[SiteRecord]:
    """Yield the records of gates, norms and calls; activations have records of their own."""
    for one in found:
        if one.record is not None and one.record.kind != "activation":
            yield one.record


def put(found: Sequence[Swap]) -> None:
    """Let modules rebuild outputs, in place."""
    for one in found:
        swap(one.module, one.kind, one.path, one.gate, one.codes, exact=one.exact)


@contextmanager
def swapped(found: Sequence[Swap]) -> Iterator[None]:
    """Let modules rebuild outputs until the context ends."""
    put(found)
    try:
        yield
    finally:
        for one in found:
            put_back(one.module)


def _free(module: nn.Module) -> bool:
    """Whether a module's class alone determines what it computes."""
    return "forward" not in vars(module) and not isinstance(module, Rebuilding)


def _rebuilds(module: nn.Module) -> bool:
    """Whether a module is a layer that an earlier conversion made keep less."""
    return isinstance(module, Rebuilding) and module.fitact_kind in ("Conv1D", *CONSUMERS_OF.values())


def _consumers(model: nn.Module) -> Iterator[Swap]:
    for path, module in model.named_modules():
        kind = "Conv1D" if layers.is_conv1d(module) else CONSUMERS_OF.get(type(module))
        # of other classes, to read a weight may change it: spectral norm iterates
        if not (kind and _free(module) and isinstance(weight := getattr(module, "weight", None), Tensor)):
            continue
        # a frozen linear layer keeps no input, but without this it keeps autocast's cast of its weight
        if weight.requires_grad or (kind != "Convolution" and weight.dtype == torch.float32):
            yield Swap(path, module, kind)


# ------------------------------------------------------------------------------------------------------- producers


def _producers(model: nn.Module) -> Iterator[Swap]:
    chains = any(isinstance(one, (nn.GroupNorm, nn.Dropout, *BATCH_NORMS)) for one in model.modules())
    for site in {site.key: site for site in reversed(activation_sites(model))}.values():  # the first of a module's
        held = site.held
        if isinstance(held, nn.Module) and _free(held) and not site.found.converted and not site.found.refusal:
            use = site.found.learned
            kind = kind_of(held) if use is None else learned_kind(held, use)
            if kind is not None and (chains or kind != "Chained"):
                yield Swap(site.path, held, kind)
    for path, module in model.named_modules():
        if not _free(module) or has_hooks(module):
            continue
        norm = layers.recognise(module)
        if isinstance(norm, layers.Norm):
            yield Swap(path, module, "ComposedNorm" if is_composed(norm) else "Norm")
        elif type(module) is nn.GroupNorm:
            yield Swap(path, module, "Norm")
        elif type(module) in BATCH_NORMS:
            yield Swap(path, module, "BatchNorm")
        elif f"{type(module).__module__}.{type(module).__name__}" == "timm.layers.norm_act.BatchNormAct2d":
            yield Swap(path, module, "BatchNormAct")
        elif is_exact_gate(module):
            yield Swap(path, module, "OwnGate")
        elif type(module) is nn.Dropout and not module.inplace:
            yield Swap(path, module, "Dropout")


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


def gated(model: nn.Module) -> Iterator[Swap]:
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
                yield Swap(path, module, "GatedMLP", gate)


def _is_gates(site: ActivationSite) -> bool:
    found = site.found  # a gate is a function of g and u alone, without parameters
    return not (
        found.converted or found.refusal or found.in_place or found.learned is not None or has_hooks(site.held)
    )


def _one_dtype(module: nn.Module, gate: Gate) -> bool:
    """Whether the layers of a gate have weights of one dtype: then no cast between them is left out."""
    names = [name for name in (gate.gate, gate.up, gate.down) if name is not None]
    layers_of = [module.get_submodule(name) for name in names]
    return all(map(layers.is_layer, layers_of)) and len({layers.core(one).weight.dtype for one in layers_of}) == 1


def _traced(module: nn.Module, act: str, training: bool) -> Gate | None:
    """Return the gate that a module is in a mode, by what its `forward` calls; None if it does anything else."""
    try:
        with unchanged(module):
            graph = fx.GraphModule(module.train(training), _Calls().trace(module)).graph
    except Exception:  # it looks at values, or takes more than a tensor
        return None
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
