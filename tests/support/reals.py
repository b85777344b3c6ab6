"""Formulas in mpmath: Python parses a text and mpmath evaluates it, so nothing of fitact takes part."""

import re
from collections.abc import Callable
from typing import Any

import mpmath

Number = Any  # mpmath ships no types
Oracle = Callable[[Number], Number]

MP = mpmath.MPContext()
MP.dps = 200

REAL: dict[str, Any] = {
    **{name: getattr(MP, name) for name in ("asinh", "atan", "cos", "cosh", "e", "erf", "erfc", "expm1", "log")},
    **{name: getattr(MP, name) for name in ("log1p", "pi", "sign", "sin", "sinh", "sqrt", "tan", "tanh")},
    "where": lambda condition, a, b: a if condition else b,
    "abs": abs,
    "elu": lambda u, a=1: u if u > 0 else a * MP.expm1(u),
    "exp": lambda u: MP.exp(u) if u > -(10**40) else MP.zero,  # exp(−exp(10⁴)) takes long
    "exponential": MP.exp,
    "gelu": lambda u: u * MP.ncdf(u),
    "hardshrink": lambda u: u if abs(u) > MP.mpf("0.5") else MP.mpf(0),
    "hardsigmoid": lambda u: min(max(u / 6 + MP.mpf("0.5"), 0), 1),
    "hypot1": lambda u: MP.sqrt(1 + u * u),
    "isru": lambda u: u / MP.sqrt(1 + u * u),
    "leaky_relu": lambda u, a="0.01": u if u > 0 else MP.mpf(a) * u,
    "logcosh": lambda u: MP.log(MP.cosh(u)),
    "logsigmoid": lambda u: -MP.log1p(MP.exp(-u)),
    "ndtr": MP.ncdf,
    "relu": lambda u: max(u, MP.mpf(0)),
    "relu6": lambda u: min(max(u, MP.mpf(0)), MP.mpf(6)),
    "sigmoid": lambda u: 1 / (1 + MP.exp(-u)),
    "silu": lambda u: u / (1 + MP.exp(-u)),
    "sech2": lambda u: MP.sech(u) ** 2,
    "softplus": lambda u: MP.log1p(MP.exp(u)),
    "softshrink": lambda u: MP.sign(u) * max(abs(u) - MP.mpf("0.5"), 0),
    "softsign": lambda u: u / (1 + abs(u)),
    "squareplus": lambda u: (u + MP.sqrt(u * u + 4)) / 2,
    "tanh_softplus": lambda u: MP.tanh(MP.log1p(MP.exp(u))),
    "tsech2": lambda u: u * MP.sech(u) ** 2,
    "threshold": lambda u: u if u > 1 else MP.mpf(0),
}
_NUMBER = re.compile(r"(?<![\w.])(\d+\.?\d*(?:e[+-]?\d+)?)")


def real(text: str, variable: str = "x") -> Oracle:
    """Return a formula as a function of mpmath numbers; decimals have all digits in use, 200 by default."""
    code = compile(_NUMBER.sub(r"number('\1')", text), text, "eval")
    return lambda at: MP.mpmathify(eval(code, {**REAL, "number": MP.mpf, variable: at}))
