"""All shipped activations, some of every kind, including formulas of users, and all that the two ops compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat

import pytest
import torch
from torch import Tensor

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import fewbit, output
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.norms import ms_layer_norm, ms_rms_norm
from tests.support.gates import FITS, gate_module
from tests.support.generated import Generated, each_of, sizes
from tests.support.inverses import inverses, made
from tests.support.learned import CASES, learned_module, numbers_of
from tests.support.outputs import Output, outputs
from tests.support.rows import full
from tests.support.steps import Shipped, shipped


@cache
def every() -> list[Generated]:
    return [*shipped(), *inverses(), *outputs()]


OWN: dict[str, Callable[[], Generated]] = {
    "own_fewbit": lambda: Shipped.of(fewbit.fit(Activation.of("x*exp(-x**2)"), 2, "own_fewbit")),
    "own_output": lambda: Output.of(
        output.fit(Activation.of("asinh(x)"), "own_output", "1/cosh(y)"), closed="1/cosh(y)"
    ),
    "own_inverted": lambda: made("softplus(x)", None),
}
# Nothing saved but codes, or the output alone, or both.
QUICK = ("gelu_fewbit3", "tanh_output", "gelu_inverted1")
USUAL = (*QUICK, "own_inverted", "hardswish_inverted2", "gelu_relumix2", "own_fewbit", "own_output")


@cache
def kind(name: str) -> Generated:
    return OWN[name]() if name in OWN else next(each for each in every() if each.name == name)


def kinds(*quick: str) -> pytest.MarkDecorator:
    """Parametrise the fixture `case` by each kind; all but the quick ones run in the full product alone."""
    return pytest.mark.parametrize("case", full(USUAL, quick), indirect=True)


each = partial(each_of, every)
every_kind = kinds(*USUAL)
each_kind = kinds(*QUICK)


@dataclass(frozen=True)
class Operation:
    """A function of x and of what `others` makes for it; `who` errors are from; how `vmap` may cut the tensors."""

    who: str
    function: Callable[..., Tensor]
    others: Callable[[Tensor], list[Tensor]] = lambda x: []
    batched: tuple[tuple[int | None, ...], ...] = ((0,), (1,))

    def tensors(self, x: Tensor) -> list[Tensor]:
        return [x, *self.others(x)]


NORMS = {"ms_layer_norm": ms_layer_norm, "ms_rms_norm": ms_rms_norm}
# PyTorch's functions, and not; numbers of channels, and one
SEVERAL = ("recompute", "recompute_clamped", "dyt", "swish_beta")
OPERATIONS = (*USUAL, *SEVERAL, *NORMS)


def operation(name: str) -> Operation:
    if name in NORMS:
        return Operation("memory-sharing norm", lambda x: NORMS[name](x, x.shape[-1]))
    if name in FITS:
        own = FITS[name][0].name
        return Operation(
            own, getattr(gate_module(name), own), lambda x: [3 * torch.randn_like(x)], ((0, 1), (0, None))
        )
    if name in CASES:
        case = CASES[name]
        numbers = case.fit.activation.numbers
        return Operation(
            case.fit.name,
            getattr(learned_module(name), case.fit.name),
            lambda x: [each.detach() for each in numbers_of(case, x.shape[-1], torch.float32)],
            ((0, *repeat(None, len(numbers))),),
        )
    return Operation(name, kind(name).function)


def passes(function: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor | None = None, autocast=False):
    """The value and the gradients of leaves, and the bytes of each storage that is saved."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), count_saved() as saved:
        y = function(*leaves)
    y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)], sizes(saved)
