"""Activations and their derivatives, written out in NumPy and SciPy in float64: nothing of fitact takes part."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import integrate, optimize, special

Function = Callable[[np.ndarray], np.ndarray]
TANH = math.sqrt(2 / math.pi)
CUBE = 0.044715
LAMBDA, ALPHA = 1.0507009873554805, 1.6732632423543772


@dataclass(frozen=True)
class Curve:
    """f (continuous) and f′; where f′ jumps, and where it has a corner; the x of f's minimum, if it has one."""

    value: Function
    derivative: Function
    jumps: tuple[float, ...] = ()
    corners: tuple[float, ...] = ()
    minimum: float = math.nan

    def lost(self, x: np.ndarray, y: np.ndarray) -> float:
        """How far off f′ of rounded y near the minimum c may be: δ changes √(2f″(y − c)) by √(2f″δ)."""
        near = np.abs(x - self.minimum) <= 0.01
        off = np.abs(y - self.value(x))[near].max()
        distance = np.array([-1e-4, 1e-4])
        second = np.diff(self.derivative(self.minimum + distance)) / np.diff(distance)
        return float(np.sqrt(2 * second * off)[0])


def _swish(beta: float) -> Curve:
    def derivative(x: np.ndarray) -> np.ndarray:
        s, other = special.expit(beta * x), special.expit(-beta * x)
        return s + beta * x * s * other

    return Curve(lambda x: x * special.expit(beta * x), derivative, minimum=-1.278464542761073795 / beta)


def _gelu_tanh_derivative(x: np.ndarray) -> np.ndarray:
    u = 2 * TANH * (x + CUBE * x**3)
    s, other = special.expit(u), special.expit(-u)
    return s + x * s * other * 2 * TANH * (1 + 3 * CUBE * x * x)


def _mish_derivative(x: np.ndarray) -> np.ndarray:
    t = np.tanh(np.logaddexp(0, x))
    return t + x * (1 - t * t) * special.expit(x)


def _serf_derivative(x: np.ndarray) -> np.ndarray:
    u = np.logaddexp(0, x)
    return special.erf(u) + x * 2 / np.sqrt(np.pi) * np.exp(-u * u) * special.expit(x)


def _elu(scale: float, alpha: float) -> Curve:
    at = {"corners" if alpha == 1 else "jumps": (0.0,)}
    return Curve(
        lambda x: scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda x: scale * np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0))),
        **at,
    )


CURVES = {
    "atan": Curve(np.arctan, lambda x: 1 / (1 + x * x)),
    "celu": _elu(1.0, 1.0),
    "elu": _elu(1.0, 1.0),
    "gelu": Curve(
        lambda x: x * special.ndtr(x),
        lambda x: special.ndtr(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi),
        minimum=-0.751791524693564457,
    ),
    "gelu_tanh": Curve(
        lambda x: x * special.expit(2 * TANH * (x + CUBE * x**3)),
        _gelu_tanh_derivative,
        minimum=-0.7524614220710163,
    ),
    "hardswish": Curve(
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        lambda x: np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, x / 3 + 0.5)),
        jumps=(-3.0, 3.0),
        minimum=-1.5,
    ),
    "logsigmoid": Curve(lambda x: -np.logaddexp(0, -x), lambda x: special.expit(-x)),
    "mish": Curve(lambda x: x * np.tanh(np.logaddexp(0, x)), _mish_derivative, minimum=-1.1924312145154952),
    "quick_gelu": _swish(1.702),
    "relu": Curve(lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 1.0, 0.0), jumps=(0.0,)),
    "selu": _elu(LAMBDA, ALPHA),
    "serf": Curve(lambda x: x * special.erf(np.logaddexp(0, x)), _serf_derivative, minimum=-1.193059968928188),
    "sigmoid": Curve(special.expit, lambda x: special.expit(x) * special.expit(-x)),
    "silu": _swish(1.0),
    "softplus": Curve(lambda x: np.logaddexp(0, x), special.expit),
    "softsign": Curve(lambda x: x / (1 + np.abs(x)), lambda x: (1 + np.abs(x)) ** -2.0, corners=(0.0,)),
    "squareplus": Curve(lambda x: (x + np.hypot(x, 2)) / 2, lambda x: (1 + x / np.hypot(x, 2)) / 2),
    "tanh": Curve(np.tanh, lambda x: 4 * special.expit(2 * x) * special.expit(-2 * x)),
    "tanhshrink": Curve(lambda x: x - np.tanh(x), lambda x: np.tanh(x) ** 2),
}


def supremum(function: Function, low: float, high: float) -> float:
    """sup |function| over the open interval, on which it is smooth."""
    at = np.linspace(np.nextafter(low, high), np.nextafter(high, low), 4001)
    values = np.abs(function(at))
    i = int(values.argmax())
    actual = optimize.minimize_scalar(
        lambda x: -abs(float(function(np.float64(x)))),
        bounds=(at[max(i - 1, 0)], at[min(i + 1, 4000)]),
        method="bounded",
        options={"xatol": 1e-13},
    )
    return max(values[i], -actual.fun)


def quad(function: Function, points: Sequence[float]) -> float:
    """∫ function over (points[0], points[-1]), piece by piece."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", integrate.IntegrationWarning)  # of rounding, where a piece is all but 0
        exact = {"epsabs": 1e-20, "epsrel": 1e-11, "limit": 200}
        return sum(integrate.quad(lambda x: float(function(x)), a, b, **exact)[0] for a, b in pairwise(points))


def step_errors(curve: Curve, edges, levels, cuts, weight: Function = np.ones_like) -> dict[str, float]:
    """The errors of a step function, from the closed forms of f and f′ alone; its primitive starts on f."""
    heights = curve.value(edges[0]) + np.concatenate([[0.0], np.cumsum(levels * np.diff(edges))])
    objective = mass = largest = apart = squared = 0.0
    for low, high in pairwise(np.union1d(edges, cuts)):
        i = np.searchsorted(edges, (low + high) / 2) - 1

        def error(x: np.ndarray, i: int = i) -> np.ndarray:
            return curve.derivative(x) - levels[i]

        def gap(x: np.ndarray, i: int = i) -> np.ndarray:
            return curve.value(x) - heights[i] - levels[i] * (x - edges[i])

        objective += quad(lambda x, e=error: e(x) ** 2 * weight(x), [low, high])
        mass += quad(weight, [low, high])
        largest = max(largest, supremum(error, low, high))
        apart = max(apart, supremum(gap, low, high), abs(gap(high)))
        squared += quad(lambda x, g=gap: g(x) ** 2, [low, high])
    return {
        "objective": objective,
        "rms": np.sqrt(objective / mass),
        "max": largest,
        "primitive_max": apart,
        "primitive_norm": np.sqrt(squared),
    }
