"""The method `exact`: f′ as a function of the output y = f(x), so that only y is kept, and no fit is needed.

The next layer keeps y anyway, so nothing is kept in addition. The formula is derived, not looked up. A formula in
which x occurs once is a chain of functions. Each function solves an autonomous differential equation h′ = G(h),
and the value of each link follows from that of the link around it. For the branches of a `where`, a comparison of
y makes the same choice. The result is verified in high precision before it is used. Inverted (Novikov and
Oseledets, 2024) lists such formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import sympy

from fitact.errors import UsageError, quote
from fitact.fitter.analysis import float_check
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.analysis.roots import roots
from fitact.fitter.expr.atoms import (
    Expr,
    Where,
    WhereAtLeast,
    absolute,
    asinh,
    atan,
    beyond_singles,
    constant,
    cos,
    cosh,
    differentiated,
    exp,
    expm1,
    hypot1,
    isru,
    log,
    log1p,
    raised,
    relu,
    sigmoid,
    sign,
    sinh,
    softplus,
    softsign,
    squareplus,
    tan,
    tanh,
    x,
)
from fitact.fitter.expr.evaluate import evaluate
from fitact.fitter.expr.multiprecision import MP, evaluate_multiprecision
from fitact.fitter.expr.parser import MAX_EXPONENT, parse, shown, text_of
from fitact.fitter.expr.rewrite import stable
from fitact.fitter.expr.work import stage
from fitact.fitter.numerics.dtypes import DTYPES, from_output, halves, stored
from fitact.fitter.records.fit import ExactFit
from fitact.fitter.records.learned import OUTPUT, ExactLearnedFit, Setting, errors_from_output, settings, told

METHOD = "exact"
DIGITS = 150  # of the verification; tanh'(x) is 1e-43 at its ends
WIDE = 1e6  # the |x| up to which switching points of conditions are looked for
ROUNDED = 1e-14  # a smaller switching point is a rounded 0
REACH = 50.0  # the verification samples x from -REACH to REACH
SMALLEST = 1e-100  # of a derivative that is compared
AGREEMENT = 1e-20  # relative, between the formula and f'
LEARNED_POINTS = 25  # of the verification, for each of these
LOST = 0.1  # of a derivative in a learned number, relative to the larger of it and 1: more is refused
KEEP_X = "--method rebuild keeps x"
# x in float32 for the stated error: dense round 0 and out to where every activation has met its asymptote
SINGLES = np.concatenate([np.linspace(-20.0, 20.0, 200_001), np.geomspace(1e-30, 1e4, 4001)]).astype(np.float32)

# h(u) → (dh/du as a function of h, u as a function of h).
_AUTONOMOUS: dict[Any, tuple[Callable[[Expr], Expr], Callable[[Expr], Expr]]] = {
    exp: (lambda h: h, log),
    expm1: (lambda h: h + 1, log1p),
    log: (lambda h: exp(-h), exp),
    log1p: (lambda h: exp(-h), expm1),
    sigmoid: (lambda h: h * (1 - h), lambda h: log(h) - log1p(-h)),
    softplus: (lambda h: -expm1(-h), lambda h: h + log(-expm1(-h))),
    tanh: (lambda h: 1 - h**2, lambda h: (log1p(h) - log1p(-h)) / 2),
    sinh: (hypot1, asinh),
    asinh: (lambda h: 1 / cosh(h), sinh),
    atan: (lambda h: cos(h) ** 2, tan),
    softsign: (lambda h: (1 - absolute(h)) ** 2, lambda h: h / (1 - absolute(h))),
    isru: (lambda h: sympy.sqrt(1 - h**2) ** 3, lambda h: h / sympy.sqrt(1 - h**2)),
    squareplus: (lambda h: 1 / (1 + h**-2), lambda h: h - 1 / h),
}
_POSITIVE = (exp, sigmoid, softplus, squareplus, relu, absolute, cosh, hypot1)


class _NoFormulaError(Exception):
    """The derivation does not cover this formula."""


def fit(activation: Activation, name: str) -> ExactFit:
    """Derive f′ as a function of y, verify it, and state the errors from rounding y.

    Args:
        activation: f.
        name: of the fit.

    Returns:
        The fit, with its errors by storage dtype.

    Raises:
        UsageError: no such formula could be derived, or the derived one does not hold; the message says why.

    Warns:
        FitWarning: floating point fails on the formula, see `float_check.problem`.

    """
    text = derived(activation)
    formula = stable(parse(text, what="derivative", variable="y"))
    float_check.warn(activation)
    error = errors(activation, formula)
    return ExactFit(name=name, method=METHOD, activation=activation, derivative=text, error=error)


def derived(activation: Activation) -> str:
    """Return f′ as an expression in y, verified in high precision; UsageError says why there is none."""
    try:
        formula = _compared(_derivative(activation.formula, x))
    except _NoFormulaError as reason:
        raise UsageError(
            f"{activation}: no closed form of the derivative in the output was found: {reason}"
        ) from None
    if (number := beyond_singles(formula)) is not None:
        raise UsageError(f"{activation}: its derivative in the output has {number}, which float32 cannot hold")
    text = text_of(formula, "y")
    _verify(activation, formula, text)
    return text


def _derivative(node: Expr, y: Expr) -> Expr:
    """Return the derivative with respect to x of a formula whose value is y, as a formula in y."""
    if node == x:
        return sympy.Integer(1)
    if x not in node.free_symbols:
        return sympy.Integer(0)
    if isinstance(node, Where):
        return _branches(node, y)
    if node.func is relu:
        inner = _derivative(node.args[0], y)
        return Where(y, inner, sympy.Integer(0))
    if node.is_Add:
        number, rest = node.as_independent(x, as_Add=True)
        if rest.is_Add:
            raise _NoFormulaError(f"x occurs more than once in {shown(rest)}")
        return _derivative(rest, y - number)
    if node.is_Mul:
        number, rest = node.as_independent(x, as_Add=False)
        if rest.is_Mul:
            raise _NoFormulaError(f"x occurs more than once in {shown(rest)}")
        return _scaled(number, _derivative(rest, y / number))
    if node.is_Pow:
        return _power(node.base, node.exp, y)
    if node.func not in _AUTONOMOUS:
        raise _NoFormulaError(f"{shown(node.func(x))} has no inverse in this language")
    derivative, inverse = _AUTONOMOUS[node.func]
    inner = _derivative(node.args[0], inverse(y))
    return derivative(y) * inner if not isinstance(inner, Where) else _scaled(derivative(y), inner)


def _scaled(number: Expr, formula: Expr) -> Expr:
    """Return number · formula, the number inside the branches."""
    if isinstance(formula, Where):
        u, a, b = formula.args
        return formula.func(u, _scaled(number, a), _scaled(number, b))
    return number * formula


def _power(base: Expr, n: Expr, y: Expr) -> Expr:
    """Return the derivative of base**n: n·v^(n−1)·base′ with v = y^(1/n)."""
    if not n.is_number:
        raise _NoFormulaError("x occurs in an exponent")
    if abs(constant(1 / n)) > MAX_EXPONENT:
        raise _NoFormulaError(f"it would raise the output to the power {constant(1 / n):g}")
    if base.func in _POSITIVE or (base.is_Pow and base.exp.is_Integer and base.exp % 2 == 0):
        radical = raised(y, 1 / n)
    elif n.is_Integer and n % 2 == 1 and n > 0:
        radical = sign(y) * raised(absolute(y), 1 / n)
    elif n.is_Integer and n % 2 == 0:
        raise _NoFormulaError(f"{shown(base)} may have either sign, and its power {n} does not tell which")
    else:
        radical = raised(y, 1 / n)
    inner = _derivative(base, radical)
    size = raised(absolute(y) if radical.has(sign) else y, 1 - 1 / n)
    if constant(n) > 1 and isinstance(inner, Where) and inner.args[2] == 0 and inner.args[0] == radical:
        inner = inner.args[1]  # where the branch of 0 is taken, y is 0 and so is y^(1 − 1/n)
    # a radical's derivative divides by y: divide each term, so that no power of y overflows in a numerator
    return sympy.expand(n * size * inner) if 0 < constant(n) < 1 and inner.is_Add else n * size * inner


def _branches(node: Expr, y: Expr) -> Expr:
    """Return the derivative of where(u > 0, a, b), with y choosing the branch."""
    u, first, second = node.args
    at, rising = _switch(u)
    upper, lower = (first, second) if rising else (second, first)
    closed = (node.func is WhereAtLeast) == rising  # whether the switching point belongs to the upper branch
    if not upper.free_symbols:
        closed = True  # the upper branch is flat: all of its y equal this one
    elif not lower.free_symbols:
        closed = False
    kind = WhereAtLeast if closed else Where
    bound = (upper if closed else lower).xreplace({x: at})
    if not np.isfinite(constant(bound)):
        raise _NoFormulaError(
            f"{shown(upper if closed else lower)} is {constant(bound):g} where the branches meet"
        )
    ends = evaluate(node, np.array([-REACH, REACH]))
    above = y - bound if ends[0] < ends[1] else bound - y
    return kind(above, _derivative(upper, y), _derivative(lower, y))


def _switch(u: Expr) -> tuple[Expr, bool]:
    """Return the number at which a formula changes its sign, and whether from − to +."""
    derivative = differentiated(u)
    if not derivative.free_symbols and derivative != 0:
        return -u.xreplace({x: sympy.Integer(0)}) / derivative, constant(derivative) > 0
    found = roots(u, -WIDE, WIDE)
    if len(found.at) != 1 or not found.complete or found.below[0] == found.above[0]:
        raise _NoFormulaError(f"the sign of {shown(u)} changes more than once, or never")
    at = float(found.at[0])
    return sympy.Rational(repr(at if abs(at) > ROUNDED else 0.0)), bool(found.above[0] > 0)


def _compared(formula: Expr) -> Expr:
    """Return a formula whose conditions compare y itself with a number, instead of a function of y."""

    def simpler(node: Expr) -> Expr:
        u, a, b = node.args
        try:
            at, rising = _switch(u)
        except _NoFormulaError:
            return node
        at = sympy.Rational(repr(constant(at))) if abs(constant(at)) > ROUNDED else sympy.Integer(0)
        return node.func(x - at if rising else at - x, a, b)

    return formula.replace(lambda node: isinstance(node, Where), simpler)


@stage("the verification of its derivative", "write it with fewer functions")
def _verify(activation: Activation, formula: Expr, text: str) -> None:
    """Compare the formula with f′ in high precision, over the whole range and beside every breakpoint."""
    corners = activation.switch_points(-REACH, REACH)
    edges = np.concatenate([[-REACH], corners, [REACH]])
    points = np.concatenate(
        [np.linspace(-REACH, REACH, 101) + 0.0137, *(corners + d for d in (-1e-3, -1e-6, 1e-6, 1e-3))]
    )
    points = points[(np.abs(points) < REACH) & (np.min(np.abs(points[:, None] - edges), axis=1) > 1e-9)]
    compared = 0
    for point in points:
        true, y = (
            evaluate_multiprecision(activation.derivative_formula, point),
            evaluate_multiprecision(activation.formula, point, DIGITS),
        )
        if MP.isfinite(y) and not MP.isfinite(true):
            raise UsageError(f"{activation}: its derivative is not finite at x = {point:.6g}, where its value is")
        if not MP.isfinite(y) or abs(true) < SMALLEST:
            continue
        found = evaluate_multiprecision(formula, y)
        compared += 1
        if not abs(found - true) <= AGREEMENT * abs(true):
            raise UsageError(
                f"{activation}: its derivative is not a function of the output alone: at x = {point:.6g} it is "
                f"{MP.nstr(true, 6)} where the formula {quote(text)} gives {MP.nstr(found, 6)}"
            )
    if not compared:
        raise UsageError(f"{activation}: its derivative is nowhere finite from {-REACH:g} to {REACH:g}")


def errors(activation: Activation, formula: Expr) -> dict[str, float]:
    """Return the error from rounding y to each storage dtype, for x of the same dtype, to four significant digits.

    It is the maximum of |g(y) − f′(x)| / max(1, |f′(x)|) with g in float32, over all finite x in half precision
    and over a dense sample in float32. Breakpoints, and y beyond the dtype's range, are left out.
    """
    singles = np.concatenate([SINGLES, -SINGLES]).astype(np.float64)
    corners = activation.switch_points(-1e6, 1e6)
    found = {}
    for dtype in DTYPES:
        at = singles if dtype == "float32" else halves(dtype)
        at = at[~np.isin(at, corners)]
        true, y = activation.derivative(at), stored(activation, at, dtype)
        found[dtype] = from_output(activation, "its derivative", true, y, formula, dtype)
    return found


# ------------------------------------------------------------------------------------------------- learned numbers


def fit_learned(formula: Learned, name: str) -> ExactLearnedFit:
    """Derive all derivatives of a formula with learned numbers as functions of y and of these, and verify them.

    That is done for the numbers at their starts and at others near them, of either sign.

    Raises:
        UsageError: there are no such functions, they divide by a number that training may take through 0, or half
            precision of y loses the derivative in a number; the message says which.

    """
    if OUTPUT in formula.names:
        raise UsageError(f"learned number {quote(OUTPUT)}: the output has that name; choose another one")
    try:
        own = _derivatives(formula)
    except _NoFormulaError as reason:
        raise UsageError(
            f"{formula}: its derivatives are not functions of the output: {reason}; {KEEP_X}"
        ) from None
    for symbol in formula.symbols:
        if any(node.exp.is_negative and symbol in node.base.free_symbols for node in own[0].atoms(sympy.Pow)):
            raise UsageError(
                f"{formula}: from the output, its derivative in x would be divided by {symbol}, which training "
                f"may take through 0; {KEEP_X}"
            )
    texts = [text_of(one, OUTPUT) for one in own]
    own = [stable(parse(one, variable=OUTPUT, learned=formula.names)) for one in texts]
    near = [*settings(formula)]
    _verify_learned(formula, own, near)
    error = errors_from_output(formula, own, near)
    for dtype in DTYPES:
        if (lost := error[f"learned_{dtype}"]) > LOST:
            raise UsageError(
                f"{formula}: a derivative in its learned numbers, computed from the output in {dtype}, would be "
                f"off by {lost:.2g} of the larger of itself and 1; {KEEP_X}"
            )
    gradients = dict(zip(formula.names, texts[1:], strict=True))
    return ExactLearnedFit(
        name=name,
        method="learned_exact",
        activation=formula,
        derivative=texts[0],
        gradients=gradients,
        error=error,
    )


def _derivatives(formula: Learned) -> list[Expr]:
    """Return the derivatives in x and in each learned number, as formulas in y and the learned numbers."""
    for node in sympy.preorder_traversal(formula.formula):
        if isinstance(node, Where):
            raise _NoFormulaError("which branch of a where was taken cannot be told for all learned numbers")
        if node.is_Pow and x in node.free_symbols:
            raise _NoFormulaError(f"it has the power {shown(node)}")
    return [_derivative(formula.formula, x), *(_partial(formula.formula, x, one) for one in formula.symbols)]


def _partial(node: Expr, y: Expr, number: Expr) -> Expr:
    """Return the derivative with respect to a learned number of a formula whose value is y, as a formula in y."""
    if number not in node.free_symbols:
        return sympy.Integer(0)
    if x not in node.free_symbols:
        return node.diff(number)
    if node.func is relu:
        return Where(y, _partial(node.args[0], y, number), sympy.Integer(0))
    if node.is_Add:
        own, rest = node.as_independent(x, as_Add=True)
        return own.diff(number) + _partial(rest, y - own, number)
    if node.is_Mul:
        own, rest = node.as_independent(x, as_Add=False)
        return own.diff(number) * (y / own) + own * _partial(rest, y / own, number)
    derivative, inverse = _AUTONOMOUS[node.func]
    inner, slope = _partial(node.args[0], inverse(y), number), derivative(y)
    # where y has reached a bound, x may be infinite, and the derivative tends to 0
    return Where(slope, slope * inner, sympy.Integer(0)) if x in inner.free_symbols else slope * inner


@stage("the verification of its derivatives", "write it with fewer functions")
def _verify_learned(formula: Learned, own: Sequence[Expr], near: Iterable[Setting]) -> None:
    """Compare derivatives in y with those in x, in high precision, for each setting of the learned numbers."""
    truths = (formula.derivative_formula, *formula.gradient_formulas)
    for setting in near:
        value = formula.formula.xreplace(setting)
        for k, (truth, one) in enumerate(zip(truths, own, strict=True)):
            true_formula, formula_in_y = truth.xreplace(setting), one.xreplace(setting)
            for point in np.linspace(-REACH, REACH, LEARNED_POINTS) + 0.0137:
                true = evaluate_multiprecision(true_formula, point)
                y = evaluate_multiprecision(value, point, DIGITS)
                if not MP.isfinite(y) or abs(true) < SMALLEST:
                    continue
                found = evaluate_multiprecision(formula_in_y, y)
                if not abs(found - true) <= AGREEMENT * abs(true):
                    at = ", ".join(f"{symbol} = {float(number):.6g}" for symbol, number in setting.items())
                    raise UsageError(
                        f"{formula}: {told(formula, k)} is not a function of the output alone: at "
                        f"x = {point:.6g}, {at} it is {MP.nstr(true, 6)} where "
                        f"{quote(text_of(own[k], OUTPUT))} gives {MP.nstr(found, 6)}; {KEEP_X}"
                    )
