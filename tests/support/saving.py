"""Models as they are and models that save less, and what both do: outputs, gradients, errors and bytes."""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fitact
from fitact.runtime.measure.saved import count_saved

from .peak import peak_memory

HALF = torch.bfloat16
PRECISIONS = {"float32": (torch.float32, None), "bfloat16": (HALF, None), "autocast": (torch.float32, HALF)}
SETTINGS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {  # dtype, autocast
    **PRECISIONS,
    **{str(dtype)[6:]: (dtype, None) for dtype in (torch.float16, torch.float64)},
    "float64 in autocast": (torch.float64, HALF),
}
precisions = pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS.values(), ids=PRECISIONS)
settings = pytest.mark.parametrize(("dtype", "autocast"), SETTINGS.values(), ids=SETTINGS)
Step = Callable[[Any, Tensor], Any]
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


def cast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype) if dtype else nullcontext()


def pair(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    baseline = make().to(dtype).train()
    model = copy.deepcopy(baseline)
    fitact.convert(model)
    return baseline, model


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def loss_of(y: Tensor) -> Tensor:
    return (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).square().sum()


def train(model: nn.Module, x: Tensor, call: Step = lambda model, x: model(x)) -> Tensor:
    y: Tensor = call(model, x)
    loss_of(y).backward()
    return y.detach()


def stepped(
    model: nn.Module,
    x: Tensor,
    call: Step = lambda model, x: model(x),
    context: AbstractContextManager[Any] | None = None,
    autocast: torch.dtype | None = None,
) -> Any:
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with context or nullcontext(), cast(autocast):
        y: Tensor = call(model, x * 1)
    loss_of(y).backward()
    return y.detach(), x.grad, gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def observed(model: nn.Module, step: Step, x: Tensor, seed: int = 3) -> Any:
    """Return what a step returns, and all gradients; or, as a text, the error that it raises."""
    x = x.detach().requires_grad_(x.is_floating_point())
    torch.manual_seed(seed)
    try:
        result = step(model, x)
    except RuntimeError as error:
        return f"raises {error}"
    return result, x.grad, gradients(model)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return what is not the same to the last bit; NaN is the same as NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        comparable = a.dtype == b.dtype and a.shape == b.shape
        return [] if comparable and (torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True)) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [difference for key in a for difference in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return [difference for i in range(len(a)) for difference in differences(a[i], b[i], f"{path}.{i}")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r:.80}, {b!r:.80}"]


def agree(
    make: Callable[[], Any],
    step: Step = train,
    x: Tensor = X,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    raises: str = "none",
) -> tuple[Any, Any]:
    """Compare a model with its copy that saves less, to the last bit; `"copy"`: the copy alone may raise."""
    models = pair(make, dtype)
    with cast(autocast):
        expected, actual = (observed(model, step, x.to(dtype), seed=0) for model in models)
    assert raises != "none" or not isinstance(expected, str), expected
    if isinstance(expected, str):  # the texts differ: they name operations
        assert isinstance(actual, str)
    elif not (raises == "copy" and isinstance(actual, str)):
        assert not differences(expected, actual)
    assert not differences(*(dict(model.named_buffers()) for model in models))
    return models


def saving_less(make: Callable[[], Any], x: Tensor = X, wide: Tensor | None = None, **given: Any) -> Any:
    """Compare as `agree` does; return the bytes that both models save, of a wider input if it is given."""
    models, wide = agree(make, x=x, **given), x if wide is None else wide
    return saves(models, wide.to(given.get("dtype", torch.float32)), given.get("autocast"))


def off(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> float:
    """Return how far gradients are off, all in one vector, relative to those that are expected."""
    a, b = (torch.cat([x.double().flatten() for x in many if x is not None]) for many in (actual, expected))
    return float((a - b).norm() / b.norm())


def both_ways(
    compute: Callable[..., Tensor],
    *inputs: Tensor,
    autocast: torch.dtype | None = None,
    most: float = 0.0,
    **given: Any,
) -> list[int]:
    """Compare output, gradients and random state outside of the context and in it; return the saved bytes."""
    modules = [compute] if isinstance(compute, nn.Module) else []
    leaves = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
    wanted, results, sizes = [leaf for leaf in leaves if leaf.requires_grad], [], []
    for context, counted in product((nullcontext, partial(fitact.saving, **given)), (True, False)):
        torch.manual_seed(0)
        with count_saved(*modules) if counted else nullcontext() as saved, cast(autocast), context():
            y = compute(*inputs)
        sizes += [] if saved is None else [saved.bytes]
        dy = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
        results.append([(y.detach(), y.stride(), torch.rand(1))])
        for again in (True, False)[not counted :] if wanted else ():
            results[-1].append(torch.autograd.grad(y, wanted, dy, retain_graph=again))
    expected, *gradients = results[0]
    for actual, *several in results[1:]:
        assert not differences(expected, actual)
        for each in several:
            assert off(each, gradients[0]) <= most if most else not differences(gradients[0], each)
    return sizes


def saved_bytes_of(model: nn.Module, call: Callable[[], Any]) -> int:
    with count_saved(model) as saved:
        hold = call()
    assert hold is not None
    return saved.bytes


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    return saved_bytes_of(model, lambda: model(x.detach().requires_grad_()))


def saves(models: tuple[Any, Any], x: Tensor, autocast: torch.dtype | None = None) -> tuple[int, int]:
    with cast(autocast):
        before, after = (saved_bytes(model, x) for model in models)
    return before, after


def peaks(models: tuple[Any, Any], x: Tensor, call: Step = lambda model, x: model(x)) -> tuple[int, int]:
    before, after = (
        peak_memory(lambda each=each: call(each, x).sum().backward(), each)["total"] for each in models
    )
    return before, after
