"""The method `inverted`: f′ as a function of the output y = f(x) and of the monotone piece on which x lies.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545. Where f falls and then rises, as GELU and SiLU do,
y does not tell x, but y and one bit do. Backward is dx = dy · F_s(y) with F_s = f′ ∘ f⁻¹ on piece s. The next
layer keeps y anyway, so the method adds only one bit per element.

F_s is fitted directly. At an extremum f(T) it has a radical's singularity: where f′ has a root of order m − 1 at
T, x − T is a smooth function of t = |y − f(T)|^(1/m), and so is F_s. On a piece with such a point at both ends, or
inside, t is the sum of the signed radicals: near each of these points its own radical is the singular term, and
the others are smooth. A quotient of two polynomials of low degree in t replaces the paper's powers and
exponentials.

Coefficients are minimax: for given degrees they minimise the largest |p/q − f′| over all samples, by differential
correction (Cheney and Loeb 1961). Samples are rounded as a kernel sees them: where several x share a stored y, F_s
has to be near the derivatives of all of them. The floor is half their largest spread: no function of y has a
smaller error. In half precision the fits come close to the floor, and further bits cut off cells beside the
extrema, where it is highest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fitact.errors import UsageError, quote
from fitact.fitter.analysis import float_check
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import REALS
from fitact.fitter.expr.wide import Array
from fitact.fitter.numerics.dtypes import DTYPES
from fitact.fitter.numerics.minimax import Coefficients, least_squares, minimax, singles_of
from fitact.fitter.records.approximants import (
    Approximant,
    Quotient,
    Single,
    has_pole,
    variable,
)
from fitact.fitter.records.fit import InvertedFit

from .inverted_cells import Cell, cell_borders, smooth_cells
from .inverted_samples import Samples, floor_of, grouped, points_of, refined, samples_of

METHOD = "inverted"
MAX_BITS = 4
TOLERANCE = 8e-5  # of the float32 fit, relative to max(1, |f′|)
ABOVE_FLOOR = 1.1  # times the floor of its dtype: the error that a fit may have
DIVISION = 5  # a division costs as much as so many degrees of numerator and denominator
INNER = 0.25  # of the allowed error: the share that is allowed where rounding costs less than that
SETTLED = 0.05  # of the allowed error: f′ has met its limit where it differs by less
REFUSED = 0.01  # a float32 fit with a larger error is refused
MAX_DEGREES = 16  # of numerator and denominator together
EXACT = 3e-8  # a polynomial as near as this is f′ itself: t is no better where y − anchor cancels
STEPS = (1.25, 1.6, 2.2, 4, 8, 16, 32, 64, 128)  # times the allowed error, tried in turn until a fit meets it
FAR = 1e5  # the largest |t| up to which quotients are tried


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

    Each fit has the smallest degrees whose error, in float32 arithmetic with y rounded to the dtype, is at most
    the larger of `tol` and 1.1 times the floor of that dtype. If no degrees reach this, the limit is raised in
    steps. The floor counts as at least half the floor for x in float32, because few x of the dtype may share a y.

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
        UsageError: f has no such fit, see `cells`, or none of at most 16 degrees is within 0.01 of f′.

    Warns:
        FitWarning: floating point fails on the formula, see `float_check.problem`.

    """
    if not 1e-6 <= tol <= REFUSED:
        raise UsageError(f"tol: expected 1e-6 to {REFUSED:g}, got {quote(tol)}")
    least = cells(activation, None, domain)
    kept = (len(least) - 1).bit_length() if bits is None else bits
    float_check.warn(activation)
    borders: dict[str, tuple[float, ...]] = {}
    approximants: dict[str, tuple[Approximant, ...]] = {}
    for i, dtype in enumerate(DTYPES):
        parts = cells(activation, kept, domain, dtype)
        borders[dtype] = cell_borders(activation, parts)
        samples = [samples_of(activation, cell, dtype, borders[dtype], s) for s, cell in enumerate(parts)]
        floor = max(sample.floor for sample in samples)
        wide = max(
            floor_of(*points_of(activation, cell, dtype, borders[dtype], s, "float32")[1:])
            for s, cell in enumerate(parts)
        )
        base = max(tol, ABOVE_FLOOR * max(floor, wide / 2))
        goals = [base, *(base * step for step in STEPS if base * step < REFUSED), max(2 * base, REFUSED)]
        found: list[Approximant] = []
        for sample in samples:
            found.append(_fitted(activation, sample, goals))
            progress((i + len(found) / len(samples)) / len(DTYPES))
        approximants[dtype] = tuple(found)
    return record(activation, name, kept, domain, borders, approximants, {"family": "rational", "tol": tol})


def record(
    activation: Activation,
    name: str,
    bits: int,
    domain: tuple[float, float] | None,
    borders: Mapping[str, tuple[float, ...]],
    approximants: Mapping[str, tuple[Approximant, ...]],
    options: Mapping[str, float | str],
) -> InvertedFit:
    """Return the record of a fit, its errors and floors those of the worst approximants."""
    return InvertedFit(
        name=name,
        method=METHOD,
        activation=activation,
        bits=bits,
        domain=domain,
        borders=borders,
        approximants=approximants,
        error={dtype: max(approximant.error for approximant in approximants[dtype]) for dtype in DTYPES},
        floor={dtype: max(approximant.floor for approximant in approximants[dtype]) for dtype in DTYPES},
        options=options,
    )


def cells(
    activation: Activation,
    bits: int | None = None,
    domain: tuple[float, float] | None = None,
    dtype: str = "bfloat16",
) -> tuple[Cell, ...]:
    """Return the cells of x that a code of that many bits distinguishes.

    They are the intervals on which f is monotone and f, f′ and f″ are continuous. If `bits` allows for more, they
    are cut beside the extrema, where rounding y costs most, at the borders that make the floor least.

    Args:
        activation: f.
        bits: 0 to 4; as few as will do by default.
        domain: the interval of x; the reals by default.
        dtype: the storage dtype for which the floor is made least; it has no effect without `bits`.

    Returns:
        The cells, increasing, without gaps, at most 2^bits.

    Raises:
        UsageError: bits or domain are out of range; f is undefined or f′ is infinite somewhere in the domain; or
            there are more intervals than bits can tell.

    """
    if bits is not None and (type(bits) is not int or bits not in range(MAX_BITS + 1)):
        raise UsageError(f"bits: expected 0 to {MAX_BITS}, got {quote(bits)}")
    low, high = (-REALS, REALS) if domain is None else map(float, domain)
    if not -REALS <= low < high <= REALS:
        raise UsageError(f"domain: expected two increasing numbers in the range of float32, got {quote(domain)}")
    parts = smooth_cells(activation, low, high)
    least = (len(parts) - 1).bit_length()
    if least > (MAX_BITS if bits is None else bits):
        told = f"--bits {least}" if least <= MAX_BITS else "a smaller domain"
        raise UsageError(
            f"{activation}: {len(parts)} intervals of x on which it is monotone and smooth take {least} bits to "
            f"tell apart, and at most {MAX_BITS if bits is None else bits} may be kept: use {told}"
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
    least: dict[tuple[int, int], float] = {}
    for allowed in goals:
        ends = _settled(samples, allowed)
        for found in itertools.chain([exact] if exact else [], _candidates(samples, ends, allowed, least)):
            p, q = found
            t = variable(cell.radicals, samples.y[list(ends)]) if len(p) > 1 else np.zeros(2)
            a, b = sorted(t.tolist())
            if has_pole(q, a, b):
                continue
            approximant = Quotient(radicals=cell.radicals, low=a, high=b, numerator=p, denominator=q)
            if (found is exact and not samples.half) or (
                _error(approximant, samples.y, samples.derivative) <= allowed
            ):
                error, floor = stated(approximant, samples)
                return replace(approximant, error=error, floor=floor)
    raise UsageError(
        f"{activation}: no quotient of polynomials of {MAX_DEGREES} degrees gives "
        f"its derivative from x = {cell.low:.6g} to {cell.high:.6g} within {goals[-1]:.2g}; fit it on a smaller "
        "domain"
    )


def _candidates(
    samples: Samples, ends: tuple[int, int], allowed: float, least: dict[tuple[int, int], float]
) -> Iterator[Coefficients]:
    """Yield the minimax quotients whose error may be small enough, the cheapest first.

    `least` holds the least errors known so far, by degrees, and receives those that are found.
    """
    t = variable(samples.cell.radicals, samples.y)
    low, high, t = grouped(np.clip(t, *sorted(t[list(ends)])).astype(np.float64), samples.derivative)
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


def _settled(samples: Samples, allowed: float) -> tuple[int, int]:
    """Return the first and last sample between which f′ changes; t is clamped where f′ has met a limit."""
    derivative, last = samples.derivative, len(samples.derivative) - 1
    ends = [0, last]
    if samples.cell.low <= -REALS:
        off = np.abs(derivative - derivative[0]) > SETTLED * allowed * max(1.0, abs(derivative[0]))
        ends[0] = max(int(np.argmax(off)) - 1, 0) if off.any() else last
    if samples.cell.high >= REALS:
        off = np.abs(derivative - derivative[last]) > SETTLED * allowed * max(1.0, abs(derivative[last]))
        ends[1] = min(last - int(np.argmax(off[::-1])) + 1, last) if off.any() else 0
    return ends[0], max(ends)


def _degrees() -> Iterator[tuple[int, int]]:
    """Yield degrees of numerator and denominator, the cheapest first."""
    polynomials = [(a, 0) for a in range(MAX_DEGREES)]
    quotients = [(b + more, b) for b in range(1, MAX_DEGREES) for more in (-1, 0, 1)]
    pairs = [(a, b) for a, b in polynomials + quotients if a + b <= MAX_DEGREES]
    yield from sorted(pairs, key=lambda pair: (sum(pair) + DIVISION * (pair[1] > 0), pair[1]))


def stated(approximant: Callable[..., Single], samples: Samples) -> tuple[float, float]:
    """Return the error and floor of the derivative that modules compute, to four significant digits."""
    error = max(
        _error(approximant, samples.y, samples.derivative), _error(approximant, samples.kept, samples.derivative)
    )
    floor = max(samples.floor, floor_of(samples.kept, samples.derivative))
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
