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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from fitact.errors import UsageError, quote

from . import analysis, check
from .activation import Activation
from .expression import Array
from .fit import InvertedFit
from .forms import Floats, Form, Quotient, Root, Single, codes, has_pole, variable
from .minimax import Coefficients, least_squares, minimax, singles_of
from .precise import MP, Number, exactly, order
from .storage import DTYPES, halves, rounded, stored
from .zeros import LEAST_ORDER, REALS, breaks, zeros

METHOD = "inverted"
MAX_BITS = 4
TOLERANCE = 8e-5  # of the float32 fit, relative to max(1, |f′|)
ABOVE_FLOOR = 1.1  # what a fit may add to the floor of its dtype
DIVISION = 5  # degrees of numerator and denominator cost as much
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


@dataclass(frozen=True)
class Cell:
    """An interval of x on which f is monotone and smooth.

    Attributes:
        low, high: its ends; ±REALS stand for ±∞.
        direction: 1 where f rises, −1 where it falls, 0 where it is constant.
        roots: the terms of the variable t in which f′ is a smooth function of y.
        zeros: the zero of f′, in x, that each is for; NaN where there is none.

    """

    low: float
    high: float
    direction: int
    roots: tuple[Root, ...]
    zeros: tuple[float, ...]


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

    Each fit has the smallest degrees with which the error in float32 arithmetic, y rounded to the dtype, is at
    most the larger of `tol` and 1.1 times the floor of that dtype; where none has, more is allowed by steps.
    The floor counts at least as half of that of x in float32: there may be few x of the dtype itself to share a y.

    Args:
        activation: f.
        name: of the fit.
        bits: 1 to 4, or 0 where f is monotone; as few as will do by default.
        domain: the interval of x; the reals by default.
        tol: of the error, relative to max(1, |f′|).
        progress: called with the share of the work that is done.

    Returns:
        The fit.

    Raises:
        UsageError: f has no such fit, see `cells`, or none of at most 16 degrees is within 0.01 of f′.

    Warns:
        FitWarning: floating point fails on the formula, see `check.problem`.

    """
    if not 1e-6 <= tol <= REFUSED:
        raise UsageError(f"tol: expected 1e-6 to {REFUSED:g}, got {quote(tol)}")
    least = cells(activation, None, domain)
    kept = (len(least) - 1).bit_length() if bits is None else bits
    check.warn(activation)
    splits: dict[str, tuple[float, ...]] = {}
    forms: dict[str, tuple[Form, ...]] = {}
    for i, dtype in enumerate(DTYPES):
        parts = cells(activation, kept, domain, dtype)
        splits[dtype] = borders(activation, parts)
        samples = [_samples(activation, cell, dtype, splits[dtype], s) for s, cell in enumerate(parts)]
        floor = max(sample.floor for sample in samples)
        wide = max(
            _floor(*_points(activation, cell, dtype, splits[dtype], s, "float32")[1:])
            for s, cell in enumerate(parts)
        )
        base = max(tol, ABOVE_FLOOR * max(floor, wide / 2))
        goals = [base, *(base * step for step in STEPS if base * step < REFUSED), max(2 * base, REFUSED)]
        found: list[Form] = []
        for sample in samples:
            found.append(_fitted(activation, sample, goals))
            progress((i + len(found) / len(samples)) / len(DTYPES))
        forms[dtype] = tuple(found)
    return record(activation, name, kept, domain, splits, forms, {"family": "rational", "tol": tol})


def record(
    activation: Activation,
    name: str,
    bits: int,
    domain: tuple[float, float] | None,
    splits: Mapping[str, tuple[float, ...]],
    forms: Mapping[str, tuple[Form, ...]],
    options: Mapping[str, float | str],
) -> InvertedFit:
    """Return the record of a fit, its errors and floors those of the worst forms."""
    return InvertedFit(
        name=name,
        method=METHOD,
        activation=activation,
        bits=bits,
        domain=domain,
        splits=splits,
        forms=forms,
        error={dtype: max(form.error for form in forms[dtype]) for dtype in DTYPES},
        floor={dtype: max(form.floor for form in forms[dtype]) for dtype in DTYPES},
        options=options,
    )


def judged(
    activation: Activation, cell: Cell, dtype: str, splits: Sequence[float], s: int, form: Callable[..., Single]
) -> tuple[float, float]:
    """Return error and floor of a form on cell s of the splits."""
    samples = _samples(activation, cell, dtype, splits, s)
    return _stated(form, samples)


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
    roots: list[Root] = []
    zeros_of: list[float] = []
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
            roots.append(Root(float(np.float32(value)), degree, side * direction))
            zeros_of.append(float(exact))
    if len(roots) > 1:
        roots = [replace(root, sign=root.side or 1) for root in roots]
    if not roots:
        values = [float(exactly(f, at, 20)) for at in (low, high) if abs(at) < REALS]
        near = min(values, key=abs) if len(values) == 2 and values[0] * values[1] > 0 else 0.0
        roots, zeros_of = [Root(float(np.float32(near)), 1, 0)], [math.nan]
    return Cell(low, high, direction, tuple(roots), tuple(zeros_of))


def borders(activation: Activation, parts: Sequence[Cell]) -> tuple[float, ...]:
    """Return the borders between cells, float32 numbers; a border is of the cell whose derivative f′ has there."""
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
    splits = borders(activation, parts)
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
        refined += [replace(cell, low=a, high=b) for a, b in itertools.pairwise(edges)]
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
        kept: y as a module computes it; that of a formula is off by some roundings of float32.
        floor: half the spread of f′ over the x of one y, relative, at its largest.
        half: whether that dtype is one of half precision.

    """

    cell: Cell
    x: Array
    y: Single
    slope: Array
    kept: Single
    floor: float
    half: bool


def _samples(activation: Activation, cell: Cell, dtype: str, splits: Sequence[float], s: int) -> _Samples:
    x, y, slope = _points(activation, cell, dtype, splits, s)
    with np.errstate(all="ignore"):
        kept = stored(activation, x, dtype).astype(np.float32)
    return _Samples(cell, x, y, slope, kept, _floor(y, slope), dtype != "float32")


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
    x = _singles(cell) if (inputs or dtype) == "float32" else halves(inputs or dtype)
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
        return _quotient(cell, 0.0, 0.0, (0.0,), (1.0,))
    exact = _exact(activation, samples, _settled(samples, goals[0]))
    least: dict[tuple[int, int], float] = {}
    for allowed in goals:
        ends = _settled(samples, allowed)
        for found in itertools.chain([exact] if exact else [], _candidates(samples, ends, allowed, least)):
            a, b = (
                sorted(variable(cell.roots, samples.y[list(ends)]).tolist()) if len(found[0]) > 1 else (0.0, 0.0)
            )
            if has_pole(found[1], a, b):
                continue
            form = _quotient(cell, a, b, *found)
            if _error(form, samples.y, samples.slope) <= allowed or (found is exact and not samples.half):
                error, floor = _stated(form, samples)
                return replace(form, error=error, floor=floor)
    raise UsageError(
        f"activation {quote(activation.expression)}: no quotient of polynomials of {MAX_DEGREES} degrees gives "
        f"its derivative from x = {cell.low:.6g} to {cell.high:.6g} within {goals[-1]:.2g}; fit it on a smaller "
        "domain"
    )


def _quotient(
    cell: Cell, low: float, high: float, numerator: tuple[float, ...], denominator: tuple[float, ...]
) -> Quotient:
    return Quotient(
        roots=cell.roots,
        low=low,
        high=high,
        numerator=numerator,
        denominator=denominator,
        error=0.0,
        floor=0.0,
    )


def _candidates(
    samples: _Samples, ends: tuple[int, int], allowed: float, least: dict[tuple[int, int], float]
) -> Iterator[Coefficients]:
    """Yield the minimax quotients whose error may be what is allowed, the cheapest first.

    `least` is what is known of the least error by degrees, and is added to.
    """
    t = variable(samples.cell.roots, samples.y)
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
    """Yield degrees of numerator and denominator, the cheapest first."""
    polynomials = [(a, 0) for a in range(MAX_DEGREES)]
    quotients = [(b + more, b) for b in range(1, MAX_DEGREES) for more in (-1, 0, 1)]
    pairs = [(a, b) for a, b in polynomials + quotients if a + b <= MAX_DEGREES]
    yield from sorted(pairs, key=lambda pair: (sum(pair) + DIVISION * (pair[1] > 0), pair[1]))


def _stated(form: Callable[..., Single], samples: _Samples) -> tuple[float, float]:
    """Return error and floor of what modules compute, to four significant digits."""
    error = max(_error(form, samples.y, samples.slope), _error(form, samples.kept, samples.slope))
    floor = max(samples.floor, _floor(samples.kept, samples.slope))
    return float(f"{error:.4g}"), float(f"{floor:.4g}")


def _error(form: Callable[..., Single], y: Single, slope: Array) -> float:
    """Return the largest error of a form, product and sum rounded once or each for itself; inf if it is NaN."""
    size = np.maximum(1.0, np.abs(slope))
    with np.errstate(all="ignore"):
        off = [np.abs(form(y, fused=fused) - slope) / size for fused in (False, True)]
    error = float(np.max(off, initial=0.0))
    return error if math.isfinite(error) else math.inf


def _exact(activation: Activation, samples: _Samples, ends: tuple[int, int]) -> Coefficients | None:
    """Return the polynomial that f′ is, if it is one of degree 4 at most, with coefficients in float32."""
    cell, inside = samples.cell, slice(ends[0], ends[1] + 1)
    x, slope = samples.x[inside], samples.slope[inside]
    anchors = [None if math.isnan(at) else float(activation.value(np.array(at))) for at in cell.zeros]
    t = variable(cell.roots, activation.value(x), anchors)
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
