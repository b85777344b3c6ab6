"""What users do around a model, in one table: it must see the same, to the last bit, of a converted model."""

import copy
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fitact
from fitact.runtime.measure import Meter, count_saved
from fitact.runtime.saving import ERRORS, quantising
from fitact.runtime.torch_internals import storage_id
from tests.support import blocks
from tests.support.around import AROUND
from tests.support.blocks import IMAGES, MLP, UNITS, Attention, RMSNorm, built, hand, repeated
from tests.support.models import inputs_of, made
from tests.support.rows import full
from tests.support.saving import HALF, Operators, X, cast, differences, gradients, loss_of, pair, saved_bytes_of

from .test_models import SHARES


@dataclass(frozen=True)
class Example:
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Any]

    def loss(self, model: nn.Module) -> Tensor:
        output = model(**self.inputs)
        return loss_of(output) if isinstance(output, Tensor) else output.loss

    @property
    def first(self) -> Tensor | None:
        """The input that can be differentiated, a leaf; None if there is none."""
        return next((tensor for tensor in self.inputs.values() if tensor.requires_grad), None)


def unit(make: Callable[[], nn.Module], x: Tensor = X) -> Example:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    return Example(fresh, {next(iter(inspect.signature(fresh().forward).parameters)): x.clone().requires_grad_()})


def scores_changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ repeated(k).transpose(-1, -2)).bfloat16()
    weights = F.softmax(scores, -1, dtype=torch.float32)
    with torch.no_grad():
        scores.zero_()
    return weights.to(v.dtype) @ repeated(v)


def repetition_changed(m: Any, x: Tensor) -> Tensor:
    tensor = m.fc1(x)[..., :16] * 2
    repeated = tensor[..., None, :].expand(*tensor.shape[:-1], 2, 16).reshape(*tensor.shape[:-1], 32)
    y = m.fc2(repeated * torch.tanh(m.fc1(x)))
    with torch.no_grad():
        tensor.zero_()
    return y


SMALL: dict[str, Callable[[], Example]] = {
    **{name: partial(unit, make) for name, make in blocks.SMALL.items()},
    **{name: partial(unit, make, IMAGES[2]) for name, make in UNITS.items()},
    "leaky relu": partial(unit, partial(MLP, nn.LeakyReLU)),
    "softplus": partial(unit, partial(MLP, nn.Softplus)),
    "quick gelu by hand": partial(unit, partial(MLP, partial(hand, "quick gelu"))),
    "gelu by hand": partial(unit, partial(MLP, partial(hand, "gelu"))),
    "scores changed": partial(unit, partial(Attention, scores_changed)),
    "repetition changed": lambda: unit(
        lambda: built(repetition_changed, fc1=nn.Linear(16, 32), fc2=nn.Linear(32, 16))
    ),
}
REAL = [name for name in SHARES if "each" not in name]


@cache
def subject(name: str) -> Example:
    return SMALL[name]() if name in SMALL else Example(partial(made, name), inputs_of(name, torch.float32))


@cache
def _pair(name: str) -> tuple[nn.Module, nn.Module]:
    return pair(subject(name).make)


Case = Callable[[Example, nn.Module], Any]


def trained(of: Example, model: nn.Module) -> Any:
    loss = of.loss(model)
    loss.backward()
    return loss.detach(), of.first is not None and of.first.grad, gradients(model)


ATTRIBUTES = {"negative_slope": 0.5, "beta": 3.0, "eps": 0.3, "alpha": 2.0, "approximate": "tanh"}


def attributes_between(of: Example, model: nn.Module) -> Any:
    first = of.loss(model)
    for module in model.modules():
        for name in ATTRIBUTES.keys() & vars(module).keys():
            setattr(module, name, ATTRIBUTES[name])
    (first + of.loss(model)).backward()
    return gradients(model)


def stepped(model: nn.Module, replace: bool) -> None:
    for tensor in [tensor for tensor in model.parameters() if tensor.grad is not None]:
        if replace:
            tensor.data = tensor.data - 0.1 * tensor.grad
        else:
            tensor.detach().sub_(tensor.grad, alpha=0.1)
            tensor.grad = None


def two_steps(of: Example, model: nn.Module) -> Any:
    """Two steps inside one autocast, which goes on to use the first casts of the weights."""
    with cast(HALF):
        of.loss(model).backward()
        stepped(model, False)
        of.loss(model).backward()
    return gradients(model)


def step_between(of: Example, model: nn.Module, replace: bool, dtype: torch.dtype | None) -> Any:
    """As a GAN does: the weights step between a forward pass and its backward pass."""
    with cast(dtype):
        of.loss(model).backward()
        loss = of.loss(model)
        stepped(model, replace)
    loss.backward()
    return gradients(model)


def partly(of: Example, model: nn.Module) -> Any:
    """Only the gradient that is asked for is computed."""
    wanted = [*model.parameters()][-1] if of.first is None else of.first
    loss = of.loss(model)
    with Operators() as operators:
        result = torch.autograd.grad(loss, wanted)
    return result, sum("mm" in name or "convolution_backward" in name for name in operators.names)


def penalty(of: Example, model: nn.Module) -> Any:
    """The norm of the gradient is part of the loss."""
    wanted = [each for each in (of.first, *model.parameters()) if each is not None and each.requires_grad]
    loss = of.loss(model)
    actual = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    (loss + sum(each.square().sum() for each in actual if each is not None)).backward()
    return gradients(model)


def patched(of: Example, model: nn.Module) -> Any:
    """Classes get another forward, as Liger does it."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (nn.LayerNorm, RMSNorm, nn.GELU, nn.SiLU, nn.Linear, nn.Conv2d, nn.BatchNorm2d):
            forward = kind.forward
            patch.setattr(kind, "forward", lambda self, *args, forward=forward: 2 * forward(self, *args))
        return trained(of, model)


def parametrised(of: Example, model: nn.Module) -> Any:
    there = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for each in there:
        weight_norm(each)
    first = trained(of, model)
    for each in there:
        parametrize.remove_parametrizations(each, "weight")
    return first, trained(of, model)


def flops(of: Example, model: nn.Module) -> Any:
    with FlopCounterMode(display=False) as counter:
        of.loss(model).backward()
    return counter.get_total_flops()


def traced(of: Example, model: nn.Module) -> Any:
    made = torch.jit.trace(model, tuple(of.inputs.values()), check_trace=False)
    torch.manual_seed(3)
    output = made(*of.inputs.values())
    loss_of(output).backward()
    return output.detach(), of.first is not None and of.first.grad


def symbolic(of: Example, model: nn.Module) -> Any:
    graph = fx.symbolic_trace(model)
    torch.manual_seed(3)
    return [*(node.op for node in graph.graph.nodes)], trained(of, graph)


def _derived(by: Callable[[Any, Any, Tensor], Any], of: Example, model: nn.Module) -> Any:
    """A derivative of the loss by `torch.func` or in forward mode, at other parameters than the model's."""
    (name,) = of.inputs
    given = {key: 1.5 * parameter.detach() for key, parameter in model.named_parameters()}

    def value(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(functional_call(model, given, kwargs={name: x}))

    return by(value, given, of.inputs[name].detach())


def _forward_ad(value: Any, given: dict[str, Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(value(given, forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def _leaves(value: Any, given: dict[str, Tensor], x: Tensor) -> Any:
    leaves = {key: tensor.requires_grad_() for key, tensor in given.items()}
    return torch.autograd.grad(value(leaves, x), [*leaves.values()])


DERIVED: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "functional_call": _leaves,
    "func.grad": lambda value, given, x: grad(value)(given, x),
    "func.vmap of grad": lambda value, given, x: vmap(grad(value), (None, 0))(given, x[:, None]),
    "func.jvp": lambda value, given, x: torch.func.jvp(partial(value, given), (x,), (x,)),
    "func.vjp": lambda value, given, x: torch.func.vjp(value, given, x)[1](torch.ones(())),
    "forward_ad": _forward_ad,
}


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        self.names += [name] if name in ("gelu", "mul", "scaled_dot_product_attention") else []
        return func(*args, **(kwargs or {}))


def moded(of: Example, model: nn.Module) -> Any:
    """Modes of one's own see what they saw, around the model and in its forward."""
    forward, inside = model.forward, _Names()

    def within(*args: Any, **given: Any) -> Any:
        with inside:
            return forward(*args, **given)

    with _Names() as around, pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", within)
        of.loss(model).backward()
    return around.names, inside.names


def threads(of: Example, model: nn.Module) -> Any:
    model.eval()  # the order in which threads draw is chance
    weight = next(parameter for parameter in model.parameters() if parameter.ndim >= 2)
    with ThreadPoolExecutor(4) as pool:
        return [*pool.map(lambda i: torch.autograd.grad(of.loss(model) * (i + 1), weight)[0], range(4))]


def without_gradient(of: Example, model: nn.Module) -> Any:
    return [mode()(of.loss)(model) for mode in (torch.no_grad, torch.inference_mode)], trained(of, model.eval())


def compiled(parts: bool, of: Example, model: nn.Module) -> Any:
    """As a whole in one graph, or one layer alone: then what is around it is not."""
    torch._dynamo.reset()
    if not parts:
        return trained(of, torch.compile(model, backend="aot_eager", fullgraph=True))
    for module in model.modules():
        if isinstance(module, (nn.GELU, RMSNorm, nn.SiLU)):
            module.compile(backend="aot_eager")
    return trained(of, model)


def around(step: Callable[[Any, Tensor], Any], of: Example, model: nn.Module) -> Any:
    assert of.first is not None
    return step(model, of.first), of.first.grad, gradients(model)


CASES: dict[str, Case] = {
    "a step": trained,
    "attributes changed between two calls": attributes_between,
    "two steps in one autocast": two_steps,
    "weights replaced between the passes": partial(step_between, replace=True, dtype=None),
    "weights replaced between the passes, autocast": partial(step_between, replace=True, dtype=HALF),
    "a step between the passes, autocast": partial(step_between, replace=False, dtype=HALF),
    "one gradient asked for": partly,
    "gradient penalty": penalty,
    "forward patched": patched,
    "parametrised later": parametrised,
    "FlopCounterMode": flops,
    "jit.trace": traced,
    "fx.symbolic_trace": symbolic,
    "without gradient": without_gradient,
    "threads": threads,
}
ALONE: dict[str, Case] = {  # of models of one tensor
    **{name: partial(_derived, by) for name, by in DERIVED.items()},
    **{name: partial(around, step) for name, step in AROUND.items()},
    "modes": moded,
}
COMPILED: dict[str, Case] = {"compiled": partial(compiled, False), "parts compiled": partial(compiled, True)}


def seen(case: Case, of: Example, model: nn.Module) -> Any:
    if of.first is not None:
        of.first.grad = None
    torch.manual_seed(3)
    try:
        return case(of, model)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        return f"raises {type(error).__name__}: {error}"


QUICK = ("block", "calls: experts", "in place", "leaky relu", "scores changed", "repetition changed", "gate")
QUICK += ("dropout", "composed", "adapters", "group norm", "calls: attention", "calls: gelu, dropout")
QUICK += ("calls: adapter", "quick gelu by hand", "gelu by hand")
# Other hooks may store the very tensor from which another is recomputed: if it is changed later, backward raises.
SPOILT = {("scores changed", around) for around in ("checkpoint", "selective", "save_on_cpu")}
SPOILT |= {("repetition changed", "save_on_cpu")}


def _marks(name: str, case: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.full] if name not in QUICK[: 4 if case in COMPILED else None] else []
    if (name, case) in SPOILT:
        marks.append(pytest.mark.xfail(reason="raises: a change in place inside of other hooks", strict=True))
    return marks


EVERY = CASES | ALONE | COMPILED
# The quick models go through every case, the others through an eighth each, and each case has an eighth of them.
ROWS = [
    pytest.param(name, case, marks=_marks(name, case))
    for i, name in enumerate((*SMALL, *REAL))
    for j, case in enumerate(EVERY if name in QUICK else CASES | ALONE if name in SMALL else CASES)
    if name in QUICK or (i + j) % 8 == 0
]


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own deprecations
@pytest.mark.parametrize(("name", "case"), ROWS)
def test_table(name: str, case: str) -> None:
    of, call = subject(name), EVERY[case]
    expected, converted = (seen(call, of, model) for model in copy.deepcopy(_pair(name)))
    assert torch.overrides._get_current_function_mode() is None
    if isinstance(expected, str):
        assert isinstance(converted, str) and converted.partition(":")[0] == expected.partition(":")[0]
    elif case == "a step between the passes, autocast" and isinstance(converted, str):  # weights are cast again
        assert "modified by an inplace operation" in converted
    else:
        assert not differences(expected, converted)


@pytest.mark.parametrize("name", full((*SMALL, *REAL), QUICK))
def test_bytes_of_the_context(name: str) -> None:
    of = subject(name)
    baseline, model = copy.deepcopy(_pair(name))
    ways = (baseline, of.loss), (baseline, fitact.saving()(of.loss)), (model, of.loss)
    before, bare, converted = (saved_bytes_of(each, partial(loss, each)) for each, loss in ways)
    assert before > bare == converted


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", full((*SMALL, *REAL), QUICK))
def test_all_memory_that_is_held_is_counted(name: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "FEW", 64)
    of = subject(name)
    model, given = of.make(), [tensor for tensor in of.inputs.values() if isinstance(tensor, Tensor)]
    loss = fitact.saving(error)(of.loss)
    with count_saved(model) as saved:
        loss(model)
    for each in given:
        saved.records.pop(storage_id(each), None)
    with Meter([*model.parameters(), *model.buffers(), *given]) as meter:
        y = loss(model)
    assert meter.level - y.nbytes == saved.bytes
