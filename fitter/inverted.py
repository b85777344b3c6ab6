"""The method `inverted`: f′ as a function of the output y = f(x) and of which monotone piece x came from.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545. Where f falls and then rises, as GELU and SiLU do,
y does not tell x; y and one bit do, and backward is dx = dy · F_s(y) with F_s = f′ ∘ f⁻¹ on piece s. y is what the
next layer keeps anyway, so one bit an element is all that is kept in addition.

F_s is fitted directly. At an extremum f(T) it has a root's singularity: where f′ has a zero of order m − 1 at T,
x − T is a smooth function of t = |y − f(T)|^(1/m), and so is F_s. On a piece with such a point at both ends, or
inside, the signed roots are added: near each of these points its own root is the singular term, and the others are
smooth. In t, a quotient of two polynomials of low degree does what the paper does with powers and exponentials.

Coefficients are minimax: for given degrees, the least bound e with |p/q − f′| ≤ e at all samples, by differential
correction (Cheney and Loeb 1961), each step of which is a linear programme. Samples are rounded as a kernel sees
them: where several x share the y that is stored, F_s has to be near the derivatives of all of them. Half their
spread, at its worst, is the floor that no function of y can pass, and in half precision the fits come close to
it. There further bits cut off cells beside the extrema, where the floor is highest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fitact.errors import UsageError, quote

from . import analysis, check
from .activation import Activation
from .exact import rounded
from .expression import Array
from .minimax import Coefficients, least_squares, minimax, singles_of
from .precise import MP, Number, exactly, order
from .zeros import LEAST_ORDER, REALS, breaks, zeros

METHOD = "inverted"
DTYPES = ("float32", "bfloat16", "float16")
MAX_BITS = 4
TOLERANCE = 8e-5  # of the float32 fit, relative to max(1, |f′|)
ABOVE_FLOOR = 1.1  # what a fit may add to the floor of its dtype
INNER = 0.25  # of the allowed error: what is allowed where rounding costs less than that
SETTLED = 0.05  # of the allowed error: f′ has met its limit where it differs by less
REFUSED = 0.01  # a float32 fit with a larger error is none
MAX_DEGREES = 16  # of numerator and denominator together
LARGEST = 1e37  # of values and derivatives that are fitted
BESIDE = 1e-7  # of a corner, relative: where f′ is taken on its sides
CORNER = 1e-3  # by which they differ at least
EXACT = 3e-8  # a polynomial as near as this is f′ itself: t is no better where it is a root of what cancels
STEPS = (1.25, 1.6, 2.2, 4, 8, 16, 32, 64, 128)  # by which the allowed error is raised while no fit meets it
FAR = 1e5  # the largest |t| up to which quotients are tried
Bits = NDArray[np.intp]
Single = NDArray[np.float32]
Floats = NDArray[Any]  # float32 or float64


@dataclass(frozen=True)
class Root:
    """One term of the variable t: a root of y − anchor.

    Attributes:
        at: the zero of f′, in x; NaN if order is 1.
        anchor: f there, a float32.
        order: m, 1 + the order of that zero; 1 for y − anchor itself.
        side: 1 for max(y − anchor, 0)^(1/m), −1 for max(anchor − y, 0)^(1/m), 0 for the signed root on both sides.
        sign: 1 or −1, of the term in the sum.

    """

    at: float
    anchor: float
    order: float
    side: int
    sign: int = 1

    def __call__(self, y: Floats, anchor: float | None = None) -> Floats:
        """Return the term, of float32 as kernels compute it; `anchor` may be a more exact one."""
        d = y - y.dtype.type(self.anchor if anchor is None else anchor)
        size = np.abs(d) if self.side == 0 else np.maximum(d if self.side > 0 else -d, y.dtype.type(0))
        if self.order == 2:
            size = np.sqrt(size)
        elif self.order != 1:
            with np.errstate(divide="ignore"):
                size = np.exp2(np.log2(size) * y.dtype.type(1 / self.order))
        if self.side == 0:
            size = np.copysign(size, d)
        return np.asarray(size if self.sign > 0 else -size)


@dataclass(frozen=True)
class Cell:
    """An interval of x on which f is monotone and smooth.

    Attributes:
        low, high: its ends; ±REALS stand for ±∞.
        direction: 1 where f rises, −1 where it falls, 0 where it is constant.
        roots: the terms of the variable t in which f′ is a smooth function of y.

    """

    low: float
    high: float
    direction: int
    roots: tuple[Root, ...]

    def variable(self, y: Floats, anchors: Sequence[float | None] | None = None) -> Floats:
        """Return t, not clamped, of y, in the shape and dtype of y; `anchors` as in `Root`."""
        terms = zip(self.roots, anchors or [None] * len(self.roots), strict=True)
        return np.asarray(sum(root(y, anchor) for root, anchor in terms))


@dataclass(frozen=True)
class Form:
    """p(t)/q(t) on one cell for one storage dtype.

    Attributes:
        cell: the interval of x, and the variable.
        low, high: the interval that t is clamped to, float32 numbers; q > 0 on it.
        numerator, denominator: coefficients of p and q, float32 numbers, constant first; (1,) for a polynomial.
        error: max |p/q − f′| / max(1, |f′|) over the x of this cell, y being rounded to the dtype.
        floor: the least such error that any function of that y has. For float32 both are over a dense sample.

    """

    cell: Cell
    low: float
    high: float
    numerator: tuple[float, ...]
    denominator: tuple[float, ...]
    error: float
    floor: float

    def __call__(self, y: Single) -> Single:
        """Return f′ of outputs of this cell, shape of y, in float32 as kernels compute it."""
        t = np.minimum(np.maximum(self.cell.variable(y), np.float32(self.low)), np.float32(self.high))
        p = _horner(self.numerator, t)
        return p if len(self.denominator) == 1 else p / _horner(self.denominator, t)


@dataclass(frozen=True)
class Inverted:
    """f′ as a function of the output and of a code of `bits` bits.

    Attributes:
        activation: f.
        bits: kept of each element beside y; 0 where f is monotone and smooth.
        domain: the interval of x that the fit is made for; ±REALS stand for ±∞.
        splits: by storage dtype, float32 numbers, increasing: the code of x is how many of them are less than x.
        forms: by storage dtype, one for each code.

    """

    activation: Activation
    bits: int
    domain: tuple[float, float]
    splits: Mapping[str, tuple[float, ...]]
    forms: Mapping[str, tuple[Form, ...]]

    @property
    def error(self) -> dict[str, float]:
        """The largest error of the cells, by dtype."""
        return {dtype: max(form.error for form in forms) for dtype, forms in self.forms.items()}

    @property
    def floor(self) -> dict[str, float]:
        """The largest floor of the cells, by dtype."""
        return {dtype: max(form.floor for form in forms) for dtype, forms in self.forms.items()}

    def code(self, x: Array, dtype: str = "float32") -> Bits:
        """Return the code of x, any shape; that of NaN is 0."""
        return codes(self.splits[dtype], x)

    def evaluate(self, y: Array, code: Bits, dtype: str = "float32") -> Single:
        """Return f′ in float32, as kernels compute it.

        Args:
            y: outputs, already rounded to `dtype`, any shape.
            code: of their x, same shape.
            dtype: the storage dtype, one of `DTYPES`.

        Raises:
            UsageError: another dtype.

        """
        if dtype not in self.forms:
            raise UsageError(f"dtype: expected one of {', '.join(self.forms)}, got {quote(dtype)}")
        y, code = np.broadcast_arrays(np.asarray(y, dtype=np.float32), code)
        slope = np.full(y.shape, np.nan, dtype=np.float32)
        for s, form in enumerate(self.forms[dtype]):
            slope[code == s] = form(y[code == s])
        return slope


def codes(splits: Sequence[float], x: Array) -> Bits:
    """Return how many of the splits are less than x; 0 for NaN."""
    x = np.asarray(x, dtype=np.float64)
    return np.searchsorted(np.asarray(splits, dtype=np.float64), np.where(np.isnan(x), -np.inf, x))


def fit(
    activation: Activation,
    bits: int | None = None,
    *,
    domain: tuple[float, float] | None = None,
    tolerance: float = TOLERANCE,
) -> Inverted:
    """Fit f′ as a function of y on every cell, for every storage dtype.

    Each fit has the smallest degrees with which the error in float32 arithmetic, y rounded to the dtype, is at
    most the larger of `tolerance` and 1.1 times the floor of that dtype; where none has, more is allowed by steps.
    The floor counts at least as half of that of x in float32: there may be few x of the dtype itself to share a y.

    Args:
        activation: f.
        bits: 1 to 4, or 0 where f is monotone; as few as will do by default.
        domain: the interval of x; the reals by default.
        tolerance: of the error, relative to max(1, |f′|).

    Returns:
        The fit.

    Raises:
        UsageError: f has no such fit, see `cells`, or none of at most 16 degrees is within 0.01 of f′.

    Warns:
        FitWarning: floating point fails on the formula, see `check.problem`.

    """
    if not 1e-6 <= tolerance <= REFUSED:
        raise UsageError(f"tolerance: expected 1e-6 to {REFUSED:g}, got {quote(tolerance)}")
    least = cells(activation, None, domain)
    check.warn(activation)
    splits, forms = {}, {}
    for dtype in DTYPES:
        parts = least if bits is None else cells(activation, bits, domain, dtype)
        splits[dtype] = _splits(activation, parts)
        samples = [_samples(activation, cell, dtype, splits[dtype], s) for s, cell in enumerate(parts)]
        floor = max(sample.floor for sample in samples)
        wide = max(
            _floor(*_points(activation, cell, dtype, splits[dtype], s, "float32")[1:])
            for s, cell in enumerate(parts)
        )
        base = max(tolerance, ABOVE_FLOOR * max(floor, wide / 2))
        goals = [base, *(base * step for step in STEPS if base * step < REFUSED), max(2 * base, REFUSED)]
        forms[dtype] = tuple(_fitted(activation, sample, goals) for sample in samples)
    kept = (len(least) - 1).bit_length() if bits is None else bits
    return Inverted(activation, kept, (least[0].low, least[-1].high), splits, forms)


# --- cells


def cells(
    activation: Activation,
    bits: int | None = None,
    domain: tuple[float, float] | None = None,
    dtype: str = "bfloat16",
) -> tuple[Cell, ...]:
    """Return the cells of x among which a code of that many bits tells.

    They are the intervals on which f is monotone and f, f′ and f″ are continuous. Cells that are left over when
    `bits` is given are cut off where rounding y costs most, beside the extrema, at borders that make
    the floor as low as it can be.

    Args:
        activation: f.
        bits: 0 to 4; as few as will do by default.
        domain: the interval of x; the reals by default.
        dtype: the storage dtype for which the floor is to be low; without effect where `bits` is not given.

    Returns:
        The cells, increasing, without gaps, at most 2^bits.

    Raises:
        UsageError: bits or domain are out of range; f is undefined or f′ is infinite somewhere in the domain; or
            there are more intervals than bits can tell.

    """
    if bits is not None and (isinstance(bits, bool) or bits not in range(MAX_BITS + 1)):
        raise UsageError(f"bits: expected 0 to {MAX_BITS}, got {quote(bits)}")
    low, high = (-REALS, REALS) if domain is None else map(float, domain)
    if not -REALS <= low < high <= REALS:
        raise UsageError(f"domain: expected two increasing numbers in the range of float32, got {quote(domain)}")
    what = f"activation {quote(activation.expression)}"
    parts = _smooth(activation, low, high, what)
    least = (len(parts) - 1).bit_length()
    if least > (MAX_BITS if bits is None else bits):
        told = f"--bits {least}" if least <= MAX_BITS else "a smaller domain"
        raise UsageError(
            f"{what}: {len(parts)} intervals of x on which it is monotone and smooth take {least} bits to tell "
            f"apart, and at most {MAX_BITS if bits is None else bits} are to be kept: use {told}"
        )
    return parts if bits is None else _refined(activation, parts, 2**bits, dtype)


def _smooth(activation: Activation, low: float, high: float, what: str) -> tuple[Cell, ...]:
    """Return the cells without any further cuts."""
    shape = activation.monotone(low, high)
    if not shape.complete:
        where = "over the reals" if high - low > REALS else f"from {low:g} to {high:g}"
        raise UsageError(
            f"{what}: it has too many monotone pieces {where} for any number of bits; fit it on a smaller domain"
        )
    f, df = activation.formula, activation.slope
    points: dict[float, Number] = {}
    for expr in (f, df):
        points.update(breaks(expr, low, high)[0])
    found = zeros(df, low, high)
    points.update(zip(found.at.tolist(), found.exact, strict=True))
    ends = [low, *(piece.low for piece in shape.pieces[1:]), high]
    gaps = [a.high for a, b in itertools.pairwise(shape.pieces) if a.high != b.low]
    if not shape.pieces or shape.pieces[0].low != low or shape.pieces[-1].high != high or gaps:
        at = gaps[0] if gaps else low if not shape.pieces or shape.pieces[0].low != low else high
        raise UsageError(
            f"{what}: it is not defined all over the domain (see x = {at:g}); fit it on a smaller one"
        )
    kinks = analysis.breakpoints(df, activation.curvature, low, high)
    edges = {*ends, *(point.at for point in (*activation.breakpoints(low, high), *kinks))}
    for a, b in itertools.pairwise(sorted(edges)):
        within = [zero for zero in shape.zeros if a < zero.at < b]
        if len(within) > 1 or any(zero.order_below != zero.order_above for zero in within):
            edges |= {zero.at for zero in within}
    borders = sorted(edges)
    near = (high - low) / 3
    beyond = {low: _beyond(activation, low, low - near), high: _beyond(activation, high, high + near)}
    outer = {end: exact for end, exact in beyond.items() if exact is not None}
    parts = []
    for a, b in itertools.pairwise(borders):
        inside = next((zero.at for zero in shape.zeros if a < zero.at < b), None)
        direction = next(piece.direction for piece in shape.pieces if piece.low <= a and b <= piece.high)
        parts.append(_cell(activation, points, a, b, inside, direction, outer, what))
    return tuple(parts)


def _beyond(activation: Activation, end: float, far: float) -> Number | None:
    """Return the zero of f′ beyond an end of a bounded domain, if f is smooth up to it: it is felt inside."""
    if abs(far) > REALS:
        return None
    low, high = sorted((end, far))
    found = zeros(activation.slope, low, high)
    if not found.exact:
        return None
    nearest = found.exact[0 if far > end else -1]
    corners = [at for expr in (activation.formula, activation.slope) for at in breaks(expr, low, high)[0]]
    return None if any(abs(at - end) <= abs(nearest - end) for at in corners) else nearest


def _cell(
    activation: Activation,
    points: dict[float, Number],
    low: float,
    high: float,
    inside: float | None,
    direction: int,
    outer: dict[float, Number],
    what: str,
) -> Cell:
    """Return the cell between two borders, with the terms of its variable."""
    f, df = activation.formula, activation.slope
    roots = []
    for at, side in ((low, 1), (inside, 0), (high, -1)):
        if at is None or abs(at) >= REALS or not direction:
            continue
        exact = points.get(at, MP.mpf(at))
        power = order(df, exact, side or 1)
        if abs(power) <= LEAST_ORDER and at in outer:
            exact = outer[at]
            power = order(df, exact, side)
        with MP.workdps(60):
            beside = exact + (side or 1) * MP.mpf("1e-30") * max(abs(exact), MP.one)
            value = float(exactly(f, beside, 30))
        if math.isnan(power) or power < -LEAST_ORDER or not abs(value) < LARGEST:
            raise UsageError(f"{what}: it or its derivative is infinite at x = {at:g}; fit it on a smaller domain")
        if LEAST_ORDER < power < math.inf:
            degree = Fraction(1 + power).limit_denominator(8).numerator  # of f in what f′ is smooth in
            roots.append(Root(float(exact), float(np.float32(value)), float(degree), side * direction))
    if len(roots) > 1:
        roots = [replace(root, sign=root.side or 1) for root in roots]
    if not roots:
        values = [float(exactly(f, at, 20)) for at in (low, high) if abs(at) < REALS]
        near = min(values, key=abs) if len(values) == 2 and values[0] * values[1] > 0 else 0.0
        roots = [Root(math.nan, float(np.float32(near)), 1.0, 0)]
    return Cell(low, high, direction, tuple(roots))


def _splits(activation: Activation, parts: Sequence[Cell]) -> tuple[float, ...]:
    """Return the borders as float32 numbers; a border belongs to the cell whose derivative f′ has there."""
    splits = []
    for cell in parts[1:]:
        at = cell.low
        split = np.float32(at)
        below, here, above = activation.derivative(at + BESIDE * np.array([-1, 0, 1]) * max(1.0, abs(at)))
        upper = split > at or (split == at and abs(here - above) < abs(here - below))
        if upper and abs(above - below) > CORNER:
            split = np.nextafter(split, np.float32(-np.inf))
        splits.append(float(split))
    if any(a >= b for a, b in itertools.pairwise(splits)):
        raise UsageError(f"activation {quote(activation.expression)}: two of its pieces meet in float32")
    return tuple(splits)


def _refined(activation: Activation, parts: tuple[Cell, ...], count: int, dtype: str) -> tuple[Cell, ...]:
    """Cut up to `count` cells out of the given ones so that the floor of the dtype is least.

    In a cell all x of one y lie side by side. So for a given floor each run of them whose derivatives spread wider
    has to be cut, as far on as the floor allows; and the floor is found by bisection.
    """
    splits = _splits(activation, parts)
    runs = []
    for s, cell in enumerate(parts):
        x, y, slope = _points(activation, cell, dtype, splits, s)
        runs += [
            (s, x[a:b], slope[a:b] / max(1.0, float(np.max(np.abs(slope[a:b])))))
            for a, b in itertools.pairwise([0, *(np.flatnonzero(np.diff(y)) + 1).tolist(), len(x)])
            if b > a
        ]
    spread = np.array([np.ptp(slope) / 2 for _, _, slope in runs])
    low, high = 0.0, float(spread.max(initial=0.0))
    cuts: list[tuple[int, float]] = []
    while high - low > 1e-4 * high:
        floor = (low + high) / 2
        trial: list[tuple[int, float]] = []
        for i in np.flatnonzero(spread > floor):
            trial += _cuts(*runs[i], floor, count)
            if len(trial) + len(parts) > count:
                break
        if len(trial) + len(parts) > count:
            low = floor
        else:
            high, cuts = floor, trial
    refined = []
    for s, cell in enumerate(parts):
        edges = [cell.low, *sorted(at for i, at in cuts if i == s), cell.high]
        refined += [Cell(a, b, cell.direction, cell.roots) for a, b in itertools.pairwise(edges)]
    return tuple(refined)


def _cuts(s: int, x: Array, slope: Array, floor: float, count: int) -> list[tuple[int, float]]:
    """Return where a run of x is cut so that no part spreads wider than twice the floor, `count` cuts at most."""
    found: list[tuple[int, float]] = []
    start = 0
    while len(found) < count:
        wide = np.maximum.accumulate(slope[start:]) - np.minimum.accumulate(slope[start:]) > 2 * floor
        if not wide.any():
            break
        start += int(np.argmax(wide))
        middle = float(np.float32((x[start - 1] + x[start]) / 2))
        found.append((s, middle if middle < x[start] else float(x[start - 1])))
    return found


# --- samples


@dataclass(frozen=True)
class _Samples:
    """What a fit on one cell has to meet.

    Attributes:
        cell: the cell.
        x, y, slope: of every sample, by x: y rounded to the dtype, (n,) float32, and f′(x).
        floor: half the spread of f′ over the x of one y, relative, at its largest.
        half: whether that dtype is one of half precision.

    """

    cell: Cell
    x: Array
    y: Single
    slope: Array
    floor: float
    half: bool


def _samples(activation: Activation, cell: Cell, dtype: str, splits: Sequence[float], s: int) -> _Samples:
    x, y, slope = _points(activation, cell, dtype, splits, s)
    return _Samples(cell, x, y, slope, _floor(y, slope), dtype != "float32")


def _floor(y: Floats, slope: Array) -> float:
    """Return half the spread of f′ over the x of one y, relative to max(1, |f′|), at its largest."""
    low, high, _ = _grouped(y, slope)
    size = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    return float(((high - low) / size).max(initial=0.0)) / 2


def _points(
    activation: Activation, cell: Cell, dtype: str, splits: Sequence[float], s: int, inputs: str | None = None
) -> tuple[Array, Single, Array]:
    """Return x of the dtype `inputs`, y rounded to `dtype`, and f′, of a cell.

    They are all x of a half-precision dtype, or a sample of those of float32; `inputs` is `dtype` by default.
    """
    halves = np.arange(1 << 16, dtype=np.uint32)
    if (inputs or dtype) == "float32":
        x = _singles(cell)
    elif (inputs or dtype) == "bfloat16":
        x = (halves << 16).view(np.float32)
    else:
        x = halves.astype(np.uint16).view(np.float16)
    x = x[np.isfinite(x)].astype(np.float64)
    x = np.unique(x[(x >= cell.low) & (x <= cell.high)])
    x = x[codes(splits, x) == s]
    with np.errstate(all="ignore"):
        y = rounded(activation.value(x), dtype)
        slope = activation.derivative(x)
        valid = (np.abs(y) < LARGEST) & (np.abs(slope) < LARGEST)
        for end, side in ((cell.low, 1), (cell.high, -1)):  # a corner itself belongs to neither side
            beside = activation.derivative(np.array(end + side * BESIDE * max(1.0, abs(end))))
            valid &= ~((x == end) & (np.abs(slope - beside) > CORNER))
    return x[valid], y[valid].astype(np.float32), slope[valid]


def _singles(cell: Cell) -> Array:
    """Return a sample of float32 numbers: even near the middle, geometric beyond, and dense toward the ends."""
    low, high = cell.low, cell.high
    outer = np.geomspace(1e-6, REALS, 3000)
    parts = [np.linspace(max(low, -25.0), min(high, 25.0), 20001), -outer, outer, np.array([low, high])]
    if high - low < REALS:
        parts.append(np.linspace(low, high, 20001))
    for end in (low, high):
        if abs(end) < REALS:
            near = np.concatenate([np.geomspace(1e-9, 1.0, 4000), np.linspace(0.0, 4e-3, 8001)])
            near = np.concatenate([near * max(abs(end), 1e-3), np.arange(256) * np.spacing(np.float32(abs(end)))])
            parts += [end + near, end - near]
    return np.concatenate(parts).astype(np.float32).astype(np.float64)


def _grouped(key: Floats, slope: Array) -> tuple[Array, Array, Array]:
    """Return the least and the largest slope for each distinct key, and the keys, increasing."""
    if not key.size:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    at = np.argsort(key, kind="stable")
    key, slope = key[at], slope[at]
    first = np.concatenate([[0], np.flatnonzero(np.diff(key)) + 1])
    return np.minimum.reduceat(slope, first), np.maximum.reduceat(slope, first), key[first]


# --- fits


def _fitted(activation: Activation, samples: _Samples, goals: Sequence[float]) -> Form:
    """Return the form of the smallest degrees whose error is at most the first of the goals that can be met.

    A polynomial that f′ is is taken in float32 whatever it loses to rounding, which is at most twice the floor; in
    half precision there is better.
    """
    cell = samples.cell
    if not cell.direction or not samples.y.size:
        return Form(cell, 0.0, 0.0, (0.0,), (1.0,), 0.0, 0.0)
    exact = _exact(activation, samples, _settled(samples, goals[0]))
    least: dict[tuple[int, int], float] = {}
    for allowed in goals:
        ends = _settled(samples, allowed)
        for found in itertools.chain([exact] if exact else [], _candidates(samples, ends, allowed, least)):
            a, b = sorted(cell.variable(samples.y[list(ends)]).tolist()) if len(found[0]) > 1 else (0.0, 0.0)
            form = _judged(Form(cell, a, b, *found, math.inf, samples.floor), samples)
            if form.error <= allowed or (found is exact and not samples.half):
                return form
    raise UsageError(
        f"activation {quote(activation.expression)}: no quotient of polynomials of {MAX_DEGREES} degrees gives "
        f"its derivative from x = {cell.low:.6g} to {cell.high:.6g} within {goals[-1]:.2g}; fit it on a smaller "
        "domain"
    )


def _candidates(
    samples: _Samples, ends: tuple[int, int], allowed: float, least: dict[tuple[int, int], float]
) -> Iterator[Coefficients]:
    """Yield the minimax quotients whose error may be what is allowed, the cheapest first.

    `least` is what is known of the least error by degrees, and is added to.
    """
    t = samples.cell.variable(samples.y)
    low, high, t = _grouped(np.clip(t, *sorted(t[list(ends)])).astype(np.float64), samples.slope)
    if np.max(np.abs(t)) > FAR:
        return
    size = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    low, high = low / size, high / size
    inner = INNER if samples.half else 1.0
    weight = np.minimum(inner + ABOVE_FLOOR * (high - low) / 2 / allowed, 1.0)
    for degrees in _degrees():
        if max(degrees) < len(t) and least.get(degrees, 0.0) <= allowed:
            least[degrees], found = minimax(t, low, high, size, weight, degrees, allowed)
            if found is not None:
                yield found


def _settled(samples: _Samples, allowed: float) -> tuple[int, int]:
    """Return the first and last sample between which f′ moves: where it has met a limit t is clamped."""
    slope, last = samples.slope, len(samples.slope) - 1
    ends = [0, last]
    if samples.cell.low <= -REALS:
        off = np.abs(slope - slope[0]) > SETTLED * allowed * max(1.0, abs(slope[0]))
        ends[0] = max(int(np.argmax(off)) - 1, 0) if off.any() else last
    if samples.cell.high >= REALS:
        off = np.abs(slope - slope[last]) > SETTLED * allowed * max(1.0, abs(slope[last]))
        ends[1] = min(last - int(np.argmax(off[::-1])) + 1, last) if off.any() else 0
    return ends[0], max(ends)


def _degrees() -> Iterator[tuple[int, int]]:
    """Yield degrees of numerator and denominator, the cheapest first; a division counts as two degrees."""
    polynomials = [(a, 0) for a in range(MAX_DEGREES // 2)]
    quotients = [(b + more, b) for b in range(1, MAX_DEGREES) for more in (-1, 0, 1)]
    pairs = [(a, b) for a, b in polynomials + quotients if a + b <= MAX_DEGREES]
    yield from sorted(pairs, key=lambda pair: (sum(pair) + 2 * (pair[1] > 0), pair[1]))


def _judged(form: Form, samples: _Samples) -> Form:
    """Return the form with its error, infinite if it has a pole."""
    with np.errstate(all="ignore"):
        off = np.abs(form(samples.y).astype(np.float64) - samples.slope) / np.maximum(1.0, np.abs(samples.slope))
    poles = np.roots(form.denominator[::-1])
    poles = poles[np.abs(poles.imag) <= 1e-9 * np.abs(poles)].real
    error = math.inf if np.any((poles >= form.low) & (poles <= form.high)) else float(off.max())
    return replace(form, error=error if math.isfinite(error) else math.inf)


def _horner(coefficients: Sequence[float], t: Single) -> Single:
    value = np.full(t.shape, coefficients[-1], dtype=np.float32)
    for coefficient in coefficients[-2::-1]:
        value = value * t + np.float32(coefficient)
    return value


def _exact(activation: Activation, samples: _Samples, ends: tuple[int, int]) -> Coefficients | None:
    """Return the polynomial that f′ is, if it is one of degree 4 at most, with coefficients in float32."""
    cell, inside = samples.cell, slice(ends[0], ends[1] + 1)
    x, slope = samples.x[inside], samples.slope[inside]
    anchors = [None if math.isnan(r.at) else float(activation.value(np.array(r.at))) for r in cell.roots]
    t = cell.variable(activation.value(x), anchors)
    size = np.maximum(1.0, np.abs(slope))
    for degree in range(5):
        if degree and len(x) < 5 * (degree + 1):
            break
        rows = t[:, None] ** np.arange(degree + 1) / size[:, None]
        scale = np.max(np.abs(rows), axis=0)
        scale[scale == 0] = 1.0
        p = least_squares(rows / scale, slope / size)
        if np.max(np.abs(rows / scale @ p - slope / size)) <= EXACT:
            return singles_of(np.where(np.abs(p) <= EXACT, 0.0, p) / scale), (1.0,)
    return None
