"""What fitact knows by name: activations, with PyTorch's functions; gates; formulas with parameters; methods.

It imports no SymPy, so that a command line finds a wrong name at once.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fitact.base import NAME, UsageError, quote


@dataclass(frozen=True)
class Entry:
    """One row of the catalog. Its texts have {names} of parameters."""

    expression: str  # in the language of `parser`
    torch: str | None  # a call of PyTorch's own function on `x`, as generated code writes it, if there is one
    parameters: Mapping[str, float] = field(default_factory=dict)  # the default values, PyTorch's if it has any
    output: str | None = None  # the derivative as an expression in the output `y`, where it is one

    def filled(self, text: str, parameters: Mapping[str, float]) -> str:
        """Return `expression`, `torch` or `output` with values of the parameters, defaults for those not given.

        Raises:
            UsageError: a parameter is unknown or not a finite number.

        """
        for name, value in parameters.items():
            if name not in self.parameters:
                known = f"expected one of {', '.join(self.parameters)}" if self.parameters else "there are none"
                raise UsageError(f"unknown parameter {quote(name)}: {known}")
            if not math.isfinite(value):
                raise UsageError(f"parameter {name}: expected a finite number, got {value!r}")
        values = {**self.parameters, **parameters}
        return text.format(**{name: repr(float(value)) for name, value in values.items()})


# At a breakpoint the derivative of a formula is that of the branch that `where` takes there, which is PyTorch's.
# NaN fails every comparison, and so reaches a branch that keeps it.
CATALOG: dict[str, Entry] = {
    "celu": Entry(
        "where(x > 0, x, {alpha}*expm1(x/{alpha}))",
        "F.celu(x, {alpha})",
        {"alpha": 1.0},
        output="where(y > 0, 1, y/{alpha} + 1)",
    ),
    "elu": Entry(
        "where(x > 0, x, {alpha}*expm1(x))",
        "F.elu(x, {alpha})",
        {"alpha": 1.0},
        output="where(y > 0, 1, y + {alpha})",
    ),
    "exp": Entry("exp(x)", "torch.exp(x)", output="y"),
    "gelu": Entry("x*(1 + erf(x/sqrt(2)))/2", "F.gelu(x)"),
    "gelu_tanh": Entry("x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x**3)))/2", 'F.gelu(x, approximate="tanh")'),
    "hardshrink": Entry(
        "where(x >= -{lambd}, where(x <= {lambd}, 0, x), x)", "F.hardshrink(x, {lambd})", {"lambd": 0.5}
    ),
    "hardsigmoid": Entry(
        "where(x >= 3, 1, where(x <= -3, 0, x/6 + 1/2))",
        "F.hardsigmoid(x)",
        output="where(y >= 1, 0, where(y > 0, 1/6, 0))",
    ),
    "hardswish": Entry("where(x >= 3, x, where(x <= -3, 0, x*(x + 3)/6))", "F.hardswish(x)"),
    "hardtanh": Entry(
        "where(x >= {max_val}, {max_val}, where(x <= {min_val}, {min_val}, x))",
        "F.hardtanh(x, {min_val}, {max_val})",
        {"min_val": -1.0, "max_val": 1.0},
        output="where(y >= {max_val}, 0, where(y > {min_val}, 1, 0))",
    ),
    "identity": Entry("x", "torch.clone(x)", output="1"),
    "leaky_relu": Entry(
        "where(x > 0, x, {negative_slope}*x)",
        "F.leaky_relu(x, {negative_slope})",
        {"negative_slope": 0.01},
        output="where(y > 0, 1, {negative_slope})",
    ),
    "logsigmoid": Entry("-softplus(-x)", "F.logsigmoid(x)", output="-expm1(y)"),
    "mish": Entry("x*tanh(softplus(x))", "F.mish(x)"),
    "quick_gelu": Entry("x*sigmoid(1.702*x)", None),
    "relu": Entry("relu(x)", "F.relu(x)", output="where(y > 0, 1, 0)"),
    "relu2": Entry("relu(x)**2", "F.relu(x).square()", output="2*sqrt(y)"),
    "relu6": Entry(
        "where(x >= 6, 6, where(x <= 0, 0, x))", "F.relu6(x)", output="where(y >= 6, 0, where(y > 0, 1, 0))"
    ),
    # α and λ of Klambauer et al., Self-Normalizing Neural Networks, as PyTorch rounds them to float64
    "selu": Entry(
        "1.0507009873554805*where(x > 0, x, 1.6732632423543772*expm1(x))",
        "F.selu(x)",
        output="where(y > 0, 1.0507009873554805, 1.0507009873554805*1.6732632423543772 + y)",
    ),
    # Nag et al., SERF, arXiv 2108.09598
    "serf": Entry("x*erf(softplus(x))", None),
    "sigmoid": Entry("sigmoid(x)", "torch.sigmoid(x)", output="y*(1 - y)"),
    "silu": Entry("x*sigmoid(x)", "F.silu(x)"),
    # Ziyin et al., Neural Networks Fail to Learn Periodic Functions and How to Fix It, arXiv 2006.08195
    "snake": Entry("x + sin({a}*x)**2/{a}", None, {"a": 1.0}),
    "softplus": Entry("softplus(x)", "F.softplus(x)", output="-expm1(-y)"),
    "softshrink": Entry(
        "where(x >= -{lambd}, where(x <= {lambd}, 0, x - {lambd}), x + {lambd})",
        "F.softshrink(x, {lambd})",
        {"lambd": 0.5},
    ),
    "softsign": Entry("x/(1 + abs(x))", "F.softsign(x)", output="(1 - abs(y))**2"),
    # Barron, Squareplus, arXiv 2112.11687: (x + √(x² + 4))/2
    "squareplus": Entry("squareplus(x)", None, output="1/(1 + y**-2)"),
    "tanh": Entry("tanh(x)", "torch.tanh(x)", output="1 - y**2"),
    "tanhshrink": Entry("x - tanh(x)", "F.tanhshrink(x)"),
    "threshold": Entry(
        "where(x <= {threshold}, {value}, x)",
        "F.threshold(x, {threshold}, {value})",
        {"threshold": 1.0, "value": 0.0},
    ),
}

# Gates, as products of a formula in g and one in u. Their first argument goes through the activation.
GATES: dict[str, str] = {
    "geglu": "gelu(g)*u",
    "geglu_tanh": "gelu_tanh(g)*u",
    "glu": "sigmoid(g)*u",
    "quick_geglu": "quick_gelu(g)*u",
    "reglu": "relu(g)*u",
    "swiglu": "silu(g)*u",
    # as gpt-oss has it
    "swiglu_clamped": "min(g, 7)*sigmoid(1.702*min(g, 7))*(clamp(u, -7, 7) + 1)",
}

# Formulas with learned parameters: each with the start of its numbers, and whether there is one for every channel.
LEARNED: dict[str, tuple[str, dict[str, tuple[float, bool]]]] = {
    # Zhu et al., Transformers without Normalization, arXiv 2503.10622
    "dyt": ("gamma*tanh(alpha*x) + beta", {"alpha": (0.5, False), "gamma": (1.0, True), "beta": (0.0, True)}),
    # Chen et al., Stronger Normalization-Free Transformers, arXiv 2512.10938
    "derf": (
        "gamma*erf(alpha*x + shift) + beta",
        {"alpha": (0.5, False), "shift": (0.0, False), "gamma": (1.0, True), "beta": (0.0, True)},
    ),
    "prelu": ("where(x > 0, x, weight*x)", {"weight": (0.25, False)}),
    "swish_beta": ("x*sigmoid(beta*x)", {"beta": (1.0, False)}),
    # Huang, Deriving Activation Functions Using Integration, arXiv 2411.13010; as transformers has it: softplus
    # keeps the factors positive, and the starts are those at which they are 0.8
    "xielu": (
        "where(x > 0, softplus(alpha_p)*x**2 + x/2, (1/2 + softplus(alpha_n))*(expm1(min(x, -1e-6)) - x) + x/2)",
        {"alpha_p": (0.2033823208110246, False), "alpha_n": (-1.0502256128148466, False)},
    ),
}


def is_gate(text: str) -> bool:
    """Whether a text names a gate, or is meant as one: it mentions one of the two arguments."""
    return text in GATES or re.search(r"\b[gu]\b", text) is not None


def check_known(text: str) -> None:
    """Raise UsageError if a text is the name of an activation, and the catalog does not have it."""
    if text.isidentifier() and text != "x" and text not in CATALOG:
        known = f"one of {', '.join(CATALOG)}, or an expression in x such as x*sigmoid(x)"
        raise UsageError(f"unknown activation {quote(text)}: expected {known}")


def check_name(name: object, what: str = "name") -> str:
    """Return `name` if it can name a module, a function and a file; UsageError otherwise."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"{what}: expected a Python identifier in ASCII that starts with a letter and is not a keyword (80 "
            f"characters at most), got {quote(name)}"
        )
    return name


# The methods of activations, of gates and of formulas with learned parameters, each with its options beside the
# function and a name.
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "activations": {
        "fewbit": ("bits", "domain", "weight", "seed"),
        "relumix": ("bits", "objective", "restarts", "seed"),
        "inverted": ("bits", "domain", "tol", "family"),
        "output": ("derivative",),
    },
    "gates": {"recompute": ()},
    "formulas": {"recompute": ()},
}
RECORDED = {"activations": "", "gates": "gate_", "formulas": "learned_"}  # before the method in records
BITS_REQUIRED = {"fewbit": "1 to 4", "relumix": "1 to 4"}
# What the options are by default, where the method has them.
DOMAINS = {"fewbit": (-10.0, 10.0)}
