"""The method `inverted`: f′ as a function of the output y = f(x) and of the monotone piece on which x lies.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545. Where f falls and then rises, as GELU and SiLU do,
y does not tell x, but y and one bit do. Backward is dx = dy · F_s(y) with F_s = f′ ∘ f⁻¹ on piece s. The next
layer saves y anyway, so the method adds only one bit per element.

F_s is fitted directly. At an extremum f(T) it has a radical's singularity: where f′ has a root of order m − 1 at
T, x − T is a smooth function of t = |y − f(T)|^(1/m), and so is F_s. On a piece with such a point at both ends, or
inside, t is the sum of the signed radicals: near each of these points its own radical is the singular term, and
the others are smooth. A quotient of two polynomials of low degree in t replaces the paper's powers and
exponentials.

Coefficients are minimax: for given degrees they minimise the largest weighted |p/q − f′| over all samples, by
differential correction (Cheney and Loeb 1961). Errors count relative to max(1, |f′|), and in half precision up
to four times where rounding y costs nothing. Samples are rounded as a kernel sees them: where several x share a
stored y, F_s has to be near the derivatives of all of them. The floor is the least error of any function of y.
In half precision the fits come close to the floor, and further bits cut off cells beside the extrema, where it
is highest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb

from fitact.base import UsageError, quote
from fitact.fitter.analysis import REALS, Activation, breakpoints, breaks, float_check, roots
from fitact.fitter.expr import LEAST_ORDER, Array, Number, geometric, order, shifted, value
from fitact.fitter.numerics import (
    DTYPES,
    Coefficients,
    halves,
    least_squares,
    minimax,
    rounded,
    singles_of,
    stored,
)
from fitact.fitter.records import (
    Approximant,
    Floats,
    InvertedFit,
    Quotient,
    Radical,
    Single,
    check_bits,
    check_domain,
    codes,
    has_pole,
    variable,
)

METHOD = "inverted"
MAX_BITS = 4
TOLERANCE = 8e-5  # of the float32 fit, relative to max(1, |f′|)
ABOVE_FLOOR = 1.1  # times the floor of its dtype: the error that a fit may have
DIVISION = 5  # a division costs as much as five degrees of numerator and denominator
INNER = 0.25  # of the allowed error: the share that is allowed where rounding costs less than that
SETTLED = 0.05  # of the allowed error: f′ has met its limit where it differs by less
REFUSED = 0.01  # a float32 fit with a larger error is refused
MAX_DEGREES = 16  # of numerator and denominator together
# Of numerator and denominator, the cheapest first.
DEGREES = sorted(
    ((a, b) for a in range(MAX_DEGREES) for b in range(MAX_DEGREES - a + 1) if not b or abs(a - b) <= 1),
    key=lambda pair: (sum(pair) + DIVISION * (pair[1] > 0), pair[1]),
)
EXACT = 3e-8  # a polynomial as near as this is f′ itself: t is no better where y − anchor cancels
STEPS = (1.25, 1.6, 2.2, 4, 8, 16, 32, 64, 128)  # times the allowed error, tried in turn until a fit meets it
FAR = 1e5  # the largest |t| up to which quotients are tried
LARGEST = 1e37  # of x, values and derivatives that are fitted: 1.25*x*sigmoid(x) overflows where 1.25*x does
BESIDE = 1e-7  # relative distance from a corner at which f′ is taken on its sides
CORNER = 1e-3  # least difference of f′ between the sides, relative to max(1, |f′|)
SMALL = 1e35  # |f| below which a derivative that is too large is refused; beyond, f itself leaves the range


def fit(
    activation: Activation,
    name: str,
    bits: int | None = None,
    *,
    domain: tuple[float, float] | None = None,
    tol: float = TOLERANCE,
    progress: Callable[[float], None] = lambda share: None,
) -> InvertedFit:
    """Fit f′ as a function of y on every cell, for every storage dtype.

    Each fit has the smallest degrees found whose error, in float32 arithmetic with y rounded to the dtype, is at
    most the larger of `tol` and 1.1 times the floor of that dtype; in half precision, at most a quarter of that
    where rounding y costs nothing. If f′ is a polynomial in t, float32 takes that one. If no degrees reach this,
    the limit is raised in steps. The floor counts as at least half the floor for x in float32, because few x of
    the dtype may share a y.

    Args:
        activation: f.
        name: of the fit.
        bits: 1 to 4, or 0 where f is monotone; by default as few as possible.
        domain: the interval of x; the reals by default.
        tol: target of the error, relative to max(1, |f′|).
        progress: called with the share of the work that is done.

    Returns:
        The fit.

    Raises:
        UsageError: f has no such fit, see `cells`; none of at most 16 degrees is within 0.01 of f′; or in float32
            its error is above 0.01 of the largest |f′|.

    Warns:
        FitWarning: floating point fails on the formula, see `float_check.problem`.

    """
    if not 1e-6 <= tol <= REFUSED:
        raise UsageError(f"tol: expected 1e-6 to {REFUSED:g}, got {quote(tol)}")
    least = cells(activation, None, domain)
    width = (len(least) - 1).bit_length() if bits is None else bits
    float_check.warn(activation)
    borders: dict[str, tuple[float, ...]] = {}
    approximants: dict[str, tuple[Approximant, ...]] = {}
    for i, dtype in enumerate(DTYPES):
        parts = cells(activation, width, domain, dtype)
        borders[dtype] = cell_borders(activation, parts)
        samples = [samples_of(activation, cell, dtype, borders[dtype], s) for s, cell in enumerate(parts)]
        floor = max(sample.floor for sample in samples)
        wide = max(
            floor_of(*points_of(activation, cell, dtype, borders[dtype], s, "float32")[1:])
            for s, cell in enumerate(parts)
        )
        base = max(tol, ABOVE_FLOOR * max(floor, wide / 2))
        goals = [base, *(base * step for step in STEPS if base * step < REFUSED), max(2 * base, REFUSED)]
        fitted: list[Approximant] = []
        for sample in samples:
            fitted.append(_fitted(activation, sample, goals))
            progress((i + len(fitted) / len(samples)) / len(DTYPES))
        steepest = max(np.max(np.abs(sample.derivative), initial=0.0) for sample in samples)
        if dtype == "float32" and max(approximant.error for approximant in fitted) > REFUSED * steepest:
            raise UsageError(
                f"{activation}: its slopes are {steepest:.2g} at most, and the error is not far below: fit a "
                "multiple of it with larger slopes, or give a smaller --tol"
            )
        approximants[dtype] = tuple(fitted)
    options = {"family": "rational", "tol": tol}
    return record(
        approximants, activation=activation, name=name, bits=width, domain=domain, borders=borders, options=options
    )


def record(approximants: Mapping[str, tuple[Approximant, ...]], **fields: Any) -> InvertedFit:
    """Return the record of a fit, its errors and floors those of the worst approximants."""
    error = {dtype: max(approximant.error for approximant in approximants[dtype]) for dtype in DTYPES}
    floor = {dtype: max(approximant.floor for approximant in approximants[dtype]) for dtype in DTYPES}
    return InvertedFit(method=METHOD, approximants=approximants, error=error, floor=floor, **fields)


def cells(
    activation: Activation,
    bits: int | None = None,
    domain: tuple[float, float] | None = None,
    dtype: str = "bfloat16",
) -> tuple[Cell, ...]:
    """Return the cells of x that a code of that many bits distinguishes.

    They are the intervals on which f is monotone and f, f′ and f″ are continuous. If `bits` allows for more, they
    are cut beside the extrema, where rounding y costs most, at the borders that make the floor of the dtype least.
    The cells increase, without gaps, and are at most 2^bits.

    Raises:
        UsageError: bits or domain are out of range; f is undefined or f′ is infinite somewhere in the domain; or
            there are more intervals than bits can tell.

    """
    if bits is not None:
        check_bits(bits, range(MAX_BITS + 1))
    low, high = map(float, domain or (-REALS, REALS))
    check_domain((low, high), REALS)
    parts = smooth_cells(activation, low, high)
    least = (len(parts) - 1).bit_length()
    if least > (MAX_BITS if bits is None else bits):
        advice = f"--bits {least}" if least <= MAX_BITS else "a smaller domain"
        raise UsageError(
            f"{activation}: {len(parts)} intervals of x on which it is monotone and smooth take {least} bits to "
            f"tell apart, and at most {MAX_BITS if bits is None else bits} may be saved: use {advice}"
        )
    return parts if bits is None else refined(activation, parts, 2**bits, dtype)


def _fitted(activation: Activation, samples: Samples, goals: Sequence[float]) -> Approximant:
    """Return the approximant of the smallest degrees whose error is at most the first goal that can be met.

    If f′ is a polynomial in t, float32 takes that polynomial although it loses up to twice the floor to rounding;
    half precision has better approximants.
    """
    cell = samples.cell
    if not cell.direction or not samples.y.size:
        return Quotient(radicals=cell.radicals, low=0.0, high=0.0, numerator=(0.0,), denominator=(1.0,))
    exact = _exact(activation, samples, _settled(samples, goals[0]))
    inner = INNER if samples.half else 1.0
    least: dict[tuple[int, int], float] = {}
    for allowed in goals:
        ends = _settled(samples, allowed)
        if samples.half and allowed == goals[-1]:
            inner, least = 1.0, {}
        for p, q in itertools.chain([exact] if exact else [], _candidates(samples, ends, allowed, inner, least)):
            exactly = (p, q) == exact and not samples.half
            y = samples.y[list(ends)]
            if exactly:  # it holds beyond the outermost samples, too
                beyond = [cell.low <= -REALS and not ends[0], cell.high >= REALS and ends[1] == len(samples.y) - 1]
                y = np.where(beyond, np.copysign(np.float32(LARGEST), y), y)
            t = variable(cell.radicals, y) if len(p) > 1 else np.zeros(2)
            a, b = sorted(t.tolist())
            if has_pole(q, a, b):
                continue
            approximant = Quotient(radicals=cell.radicals, low=a, high=b, numerator=p, denominator=q)
            if exactly or _error(approximant, samples.y, samples.derivative) <= allowed:
                error, floor = stated(approximant, samples)
                return replace(approximant, error=error, floor=floor)
    raise UsageError(
        f"{activation}: no quotient of polynomials of {MAX_DEGREES} degrees was found that gives "
        f"its derivative from x = {cell.low:.6g} to {cell.high:.6g} within {goals[-1]:.2g}; fit it on a smaller "
        "domain"
    )


def _candidates(
    samples: Samples, ends: tuple[int, int], allowed: float, inner: float, least: dict[tuple[int, int], float]
) -> Iterator[Coefficients]:
    """Yield the minimax quotients whose error may be small enough, the cheapest first.

    Where rounding costs less, `inner` is the share of the allowed error that counts as all of it.
    `least` holds the least errors known so far, by degrees, and receives those that are found.
    """
    t = variable(samples.cell.radicals, samples.y)
    low, high, t = grouped(np.clip(t, *sorted(t[list(ends)])).astype(np.float64), samples.derivative)
    if np.max(np.abs(t)) > FAR:
        return
    size = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    low, high = low / size, high / size
    weight = np.minimum(inner + ABOVE_FLOOR * (high - low) / 2 / allowed, 1.0)
    for degrees in DEGREES:
        if max(degrees) < len(t) and least.get(degrees, 0.0) <= allowed:
            least[degrees], quotient = minimax(t, low, high, size, weight, degrees, allowed)
            if quotient is not None:
                yield quotient


def _settled(samples: Samples, allowed: float) -> tuple[int, int]:
    """Return the first and last sample between which f′ changes; t is clamped where f′ has met a limit."""
    last = len(samples.derivative) - 1

    def settled(derivative: Array) -> int:
        off = np.abs(derivative - derivative[0]) > SETTLED * allowed * max(1.0, abs(derivative[0]))
        return max(int(np.argmax(off)) - 1, 0) if off.any() else last

    first = settled(samples.derivative) if samples.cell.low <= -REALS else 0
    return first, max(first, last - settled(samples.derivative[::-1]) if samples.cell.high >= REALS else last)


def stated(approximant: Callable[..., Single], samples: Samples) -> tuple[float, float]:
    """Return the error and floor of the derivative that modules compute, to four significant digits."""
    error = max(_error(approximant, y, samples.derivative) for y in (samples.y, samples.saved))
    floor = max(samples.floor, floor_of(samples.saved, samples.derivative))
    return float(f"{error:.4g}"), float(f"{floor:.4g}")


def _error(approximant: Callable[..., Single], y: Single, derivative: Array) -> float:
    """Return the largest error of an approximant, product and sum rounded once or each; infinite if NaN."""
    size = np.maximum(1.0, np.abs(derivative))
    with np.errstate(all="ignore"):
        off = [np.abs(approximant(y, fused=fused) - derivative) / size for fused in (False, True)]
    error = float(np.max(off, initial=0.0))
    return error if math.isfinite(error) else math.inf


def _exact(activation: Activation, samples: Samples, ends: tuple[int, int]) -> Coefficients | None:
    """Return f′ as a polynomial in t with float32 coefficients, None unless it is one of degree 4 at most."""
    cell, inside = samples.cell, slice(ends[0], ends[1] + 1)
    x, derivative = samples.x[inside], samples.derivative[inside]
    anchors = [None if math.isnan(at) else float(activation.value(np.array(at))) for at in cell.roots]
    t = variable(cell.radicals, activation.value(x), anchors)
    size = np.maximum(1.0, np.abs(derivative))
    for degree in range(5):
        if degree and len(x) < 5 * (degree + 1):
            break
        rows = np.vander(t, degree + 1, increasing=True) / size[:, None]
        scale = np.max(np.abs(rows), axis=0)
        scale[scale == 0] = 1.0
        p = least_squares(rows / scale, derivative / size)
        if np.max(np.abs(rows / scale @ p - derivative / size)) <= EXACT:
            return singles_of(np.where(np.abs(p) <= EXACT, 0.0, p) / scale), (1.0,)
    return None


# --- cells: intervals of x on each of which f′ is a smooth function of a variable made of y = f(x)


@dataclass(frozen=True)
class Cell:
    """An interval of x on which f is monotone and smooth."""

    low: float  # ±REALS means ±∞
    high: float
    direction: int  # 1 where f rises, −1 where it falls, 0 where it is constant
    radicals: tuple[Radical, ...]  # the terms of the variable t in which f′ is a smooth function of y
    roots: tuple[float, ...]  # the root of f′, in x, that each radical comes from; NaN if there is none


def smooth_cells(activation: Activation, low: float, high: float) -> tuple[Cell, ...]:
    """Return the intervals on which f is monotone and f, f′ and f″ are continuous; see `inverted.cells`."""
    shape = activation.monotone(low, high)
    if math.isfinite(shape.reach):
        where = "over the reals" if high - low > REALS else f"from {low:g} to {high:g}"
        raise UsageError(
            f"{activation}: its monotone pieces {where} are too many or too narrow to be found; "
            "fit it on a smaller domain"
        )
    f, df = activation.formula, activation.derivative_formula
    zeros = roots(df, low, high)
    points = {**breaks(f, low, high)[0], **breaks(df, low, high)[0], **zeros.points}
    ends = [low, *(piece.low for piece in shape.pieces[1:]), high]
    gaps = [a.high for a, b in itertools.pairwise(shape.pieces) if a.high != b.low]
    if not shape.pieces or shape.pieces[0].low != low or shape.pieces[-1].high != high or gaps:
        at = gaps[0] if gaps else low if not shape.pieces or shape.pieces[0].low != low else high
        raise UsageError(
            f"{activation}: it is not defined all over the domain (see x = {at:g}); fit it on a smaller one"
        )
    kinks = breakpoints(df, activation.second_derivative_formula, low, high)
    edges = {*ends, *(point.at for point in (*activation.breakpoints(low, high), *kinks))}
    for a, b in itertools.pairwise(sorted(edges)):
        within = [root for root in shape.roots if a < root.at < b]
        if len(within) > 1 or any(root.order_below != root.order_above for root in within):
            edges |= {root.at for root in within}
    ends = sorted(edges)
    near = (high - low) / 3
    beyond = {low: _beyond(activation, low, low - near), high: _beyond(activation, high, high + near)}
    outer = {end: exact for end, exact in beyond.items() if exact is not None}
    parts = []
    for a, b in itertools.pairwise(ends):
        inside = next((root.at for root in shape.roots if a < root.at < b), None)
        direction = next(piece.direction for piece in shape.pieces if piece.low <= a and b <= piece.high)
        parts.append(_cell(activation, points, a, b, inside, direction, outer))
    return tuple(parts)


def _beyond(activation: Activation, end: float, far: float) -> Number | None:
    """Return the root of f′ beyond an end of a bounded domain if f is smooth up to it: it matters inside too."""
    if abs(far) > REALS:
        return None
    low, high = sorted((end, far))
    zeros = list(roots(activation.derivative_formula, low, high).points.values())
    if not zeros:
        return None
    nearest = zeros[0 if far > end else -1]
    corners = {**breaks(activation.formula, low, high)[0], **breaks(activation.derivative_formula, low, high)[0]}
    return None if any(abs(at - end) <= abs(nearest - end) for at in corners) else nearest


def _cell(
    activation: Activation,
    points: dict[float, Number],
    low: float,
    high: float,
    inside: float | None,
    direction: int,
    outer: dict[float, Number],
) -> Cell:
    """Return the cell between two borders, with the terms of its variable."""
    f, df = activation.formula, activation.derivative_formula
    radicals: list[Radical] = []
    roots_of: list[float] = []
    for at, side in ((low, 1), (inside, 0), (high, -1)):
        if at is None or abs(at) >= REALS or not direction:
            continue
        exact = points.get(at, arb(at))
        power = order(df, exact, side or 1)
        if abs(power) <= LEAST_ORDER and at in outer:
            exact = outer[at]
            power = order(df, exact, side)
        beside = float(value(f, shifted(exact, side or 1, "1e-30"), 30))
        if math.isnan(power) or power < -LEAST_ORDER or not abs(beside) < LARGEST:
            raise UsageError(
                f"{activation}: it or its derivative is infinite at x = {at:g}; fit it on a smaller domain"
            )
        if LEAST_ORDER < power < math.inf:
            degree = Fraction(1 + power).limit_denominator(8).numerator  # of f in a variable in which f′ is smooth
            radicals.append(Radical(float(np.float32(beside)), degree, side * direction))
            roots_of.append(float(exact))
    if len(radicals) > 1:
        radicals = [replace(radical, sign=radical.side or 1) for radical in radicals]
    if not radicals:
        values = [float(value(f, at, 20)) for at in (low, high) if abs(at) < REALS]
        near = min(values, key=abs) if len(values) == 2 and values[0] * values[1] > 0 else 0.0
        near = near if abs(near) < LARGEST else 0.0  # float32 has none of its outputs
        radicals, roots_of = [Radical(float(np.float32(near)), 1, 0)], [math.nan]
    return Cell(low, high, direction, tuple(radicals), tuple(roots_of))


def cell_borders(activation: Activation, parts: Sequence[Cell]) -> tuple[float, ...]:
    """Return the borders between cells, float32 numbers; a border belongs to the cell whose f′ it has."""
    borders = []
    for cell in parts[1:]:
        at = cell.low
        border = np.float32(at)
        below, here, above = activation.derivative(at + BESIDE * np.array([-1, 0, 1]) * max(1.0, abs(at)))
        upper = border > at or (border == at and abs(here - above) < abs(here - below))
        if upper and abs(above - below) > CORNER:
            border = np.nextafter(border, np.float32(-np.inf))
        borders.append(float(border))
    if any(a >= b for a, b in itertools.pairwise(borders)):
        raise UsageError(f"{activation}: two of its pieces meet in float32")
    return tuple(borders)


# --- the samples that a fit on a cell has to meet


@dataclass(frozen=True)
class Samples:
    """The samples that a fit on one cell has to meet, (n,)."""

    cell: Cell
    x: Array  # increasing
    y: Single  # rounded to the dtype
    derivative: Array
    saved: Single  # y as a module computes it; for a formula it is off by some roundings of float32
    floor: float  # the least error of any function of y, see `floor_of`
    half: bool  # whether the dtype is one of half precision


def samples_of(activation: Activation, cell: Cell, dtype: str, borders: Sequence[float], s: int) -> Samples:
    """Return the samples of cell s."""
    x, y, derivative = points_of(activation, cell, dtype, borders, s)
    saved = stored(activation, x, dtype).astype(np.float32)
    if (lost := x[np.isnan(saved)]).size:
        raise UsageError(
            f"{activation}: a part of it overflows in float32 at x = {min(lost, key=abs):g}: write it with "
            "where(abs(x) > a, ..., ...), or fit it on a smaller domain"
        )
    return Samples(cell, x, y, derivative, saved, floor_of(y, derivative), dtype != "float32")


def floor_of(y: Floats, derivative: Array) -> float:
    """Return the least error, relative to max(1, |f′|), of any function of y."""
    low, high, _ = grouped(y, derivative)
    sizes = np.maximum(1.0, np.abs(low)) + np.maximum(1.0, np.abs(high))
    return float(((high - low) / sizes).max(initial=0.0))


def points_of(
    activation: Activation, cell: Cell, dtype: str, borders: Sequence[float], s: int, inputs: str | None = None
) -> tuple[Array, Single, Array]:
    """Return x of the dtype `inputs`, y rounded to `dtype`, and f′, of a cell.

    They are all x of a half-precision dtype, or a sample of float32; `inputs` is `dtype` by default.
    """
    x = _singles(cell) if (inputs or dtype) == "float32" else halves(inputs or dtype)
    x = np.unique(x[(x >= cell.low) & (x <= cell.high) & (np.abs(x) < LARGEST)])
    x = x[codes(borders, x) == s]
    with np.errstate(all="ignore"):
        y = rounded(activation.value(x), dtype)
        derivative = activation.derivative(x)
        valid = (np.abs(y) < LARGEST) & (np.abs(derivative) < LARGEST)
        steep = ~valid & (np.abs(y) < SMALL)
        if steep.any():
            raise UsageError(
                f"{activation}: its derivative is {derivative[steep][0]:g} at "
                f"x = {x[steep][0]:g}, and at most {LARGEST:g} can be fitted: fit it on a smaller domain"
            )
        for end, side in ((cell.low, 1), (cell.high, -1)):  # a corner itself belongs to neither side
            beside = activation.derivative(np.array(end + side * BESIDE * max(1.0, abs(end))))
            valid &= ~((x == end) & (np.abs(derivative - beside) > CORNER * np.maximum(1.0, np.abs(beside))))
    return x[valid], y[valid].astype(np.float32), derivative[valid]


def _singles(cell: Cell) -> Array:
    """Return a sample of float32 numbers: even near the middle, geometric beyond, and dense toward the ends."""
    low, high = cell.low, cell.high
    outer = geometric(1e-6, REALS, 3000)
    parts = [np.linspace(max(low, -25.0), min(high, 25.0), 20001), -outer, outer, np.array([low, high])]
    if high - low < REALS:
        parts.append(np.linspace(low, high, 20001))
    for end in (low, high):
        if abs(end) < REALS:
            near = np.concatenate([geometric(1e-9, 1.0, 4000), np.linspace(0.0, 4e-3, 8001)])
            near = np.concatenate([near * max(abs(end), 1e-3), np.arange(256) * np.spacing(np.float32(abs(end)))])
            parts += [end + near, end - near]
    return np.concatenate(parts).astype(np.float32).astype(np.float64)


def grouped(key: Floats, derivative: Array) -> tuple[Array, Array, Array]:
    """Return the least and the largest derivative for each distinct key, and the keys, increasing."""
    if not key.size:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    at = np.argsort(key, kind="stable")
    key, derivative = key[at], derivative[at]
    first = np.concatenate([[0], np.flatnonzero(np.diff(key)) + 1])
    return np.minimum.reduceat(derivative, first), np.maximum.reduceat(derivative, first), key[first]


def refined(activation: Activation, parts: tuple[Cell, ...], count: int, dtype: str) -> tuple[Cell, ...]:
    """Cut the given cells into up to `count`, so that the floor of the dtype is least.

    In a cell all x of one y lie side by side. For a given floor, every such run whose derivatives spread wider has
    to be cut, as far on as the floor allows. Bisection finds the floor.
    """
    borders = cell_borders(activation, parts)
    points = [points_of(activation, cell, dtype, borders, s) for s, cell in enumerate(parts)]
    x, y, derivative = (np.concatenate(column) for column in zip(*points, strict=True))
    of = np.repeat(np.arange(len(parts)), [len(cell[0]) for cell in points])
    first = np.flatnonzero((np.diff(y, prepend=np.nan) != 0) | (np.diff(of, prepend=-1) != 0))
    runs = [slice(a, b) for a, b in itertools.pairwise([*first.tolist(), len(x)])]
    size = np.maximum(1.0, np.maximum.reduceat(np.abs(derivative), first))
    derivative = derivative / np.repeat(size, np.diff(first, append=len(x)))
    spread = (np.maximum.reduceat(derivative, first) - np.minimum.reduceat(derivative, first)) / 2
    low, high = 0.0, float(spread.max(initial=0.0))
    cuts: list[tuple[int, float]] = []
    while high - low > 1e-4 * high:
        floor = (low + high) / 2
        trial: list[tuple[int, float]] = []
        for i in np.flatnonzero(spread > floor):
            trial += _cuts(int(of[first[i]]), x[runs[i]], derivative[runs[i]], floor, count)
            if len(trial) + len(parts) > count:
                break
        if len(trial) + len(parts) > count:
            low = floor
        else:
            high, cuts = floor, trial
    refined = []
    for s, cell in enumerate(parts):
        edges = [cell.low, *sorted(at for i, at in cuts if i == s), cell.high]
        refined += [replace(cell, low=a, high=b) for a, b in itertools.pairwise(edges)]
    return tuple(refined)


def _cuts(s: int, x: Array, derivative: Array, floor: float, count: int) -> list[tuple[int, float]]:
    """Return the cuts of a run of x, at most `count`, after which no part spreads wider than twice the floor."""
    cuts: list[tuple[int, float]] = []
    start = 0
    while len(cuts) < count:
        wide = np.maximum.accumulate(derivative[start:]) - np.minimum.accumulate(derivative[start:]) > 2 * floor
        if not wide.any():
            break
        start += int(np.argmax(wide))
        middle = float(np.float32((x[start - 1] + x[start]) / 2))
        cuts.append((s, middle if middle < x[start] else float(x[start - 1])))
    return cuts
