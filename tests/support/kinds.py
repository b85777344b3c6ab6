"""All shipped activations, and some of every kind, including formulas of users."""

import json
from functools import cache, partial

import pytest

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import fewbit, output
from tests.support.generated import Generated, each_of, load
from tests.support.inverses import inverses, made
from tests.support.outputs import Output, outputs
from tests.support.rows import full
from tests.support.steps import Shipped, shipped


@cache
def every() -> list[Generated]:
    """The shipped activations."""
    return [*shipped(), *inverses(), *outputs()]


def own_fewbit() -> Generated:
    fit = fewbit.fit(Activation.of("x*exp(-x**2)"), 2, "own_fewbit")
    return Shipped(fit.name, json.loads(fit.to_json()), load(fit))


def own_output() -> Generated:
    fit = output.fit(Activation.of("asinh(x)"), "own_output", "1/cosh(y)")
    return Output(fit.name, json.loads(fit.to_json()), load(fit), closed="1/cosh(y)")


OWN = {"own_fewbit": own_fewbit, "own_output": own_output, "own_inverted": lambda: made("softplus(x)", None)}
# Nothing saved but codes, or the output alone, or both.
QUICK = ("gelu_fewbit3", "tanh_output", "gelu_inverted1")
USUAL = (*QUICK, "own_inverted", "hardswish_inverted2", "gelu_relumix2", "own_fewbit", "own_output")


@cache
def kind(name: str) -> Generated:
    """One of these kinds."""
    return OWN[name]() if name in OWN else next(one for one in every() if one.name == name)


def kinds(*quick: str) -> pytest.MarkDecorator:
    """Parametrise the fixture `one` by each kind; all but the quick ones run in the full product alone."""
    return pytest.mark.parametrize("one", full(USUAL, quick), indirect=True)


each = partial(each_of, every)
every_kind = kinds(*USUAL)
each_kind = kinds(*QUICK)
