"""Functions of float32 for device code, where Triton has none or an inaccurate one.

Written in operations that Triton's interpreter has too: no libdevice, no inline assembly.
"""

from __future__ import annotations

from .triton import jit, tl


@jit
def _polynomial(u, coefficients: tl.constexpr):
    """Return a polynomial of u by its coefficients, the highest power first."""
    value = coefficients[0] * u + coefficients[1]
    for k in tl.static_range(2, len(coefficients)):
        value = value * u + coefficients[k]
    return value


@jit
def _split(u):
    """Return exp(u − n·log 2) and a whole n, with log 2 in two parts; n times the first part is exact."""
    u = tl.clamp(u, -110.0, 110.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(1.4426950408889634 * u + 0.5)
    return tl.exp2(1.4426950408889634 * ((u - n * 0.693359375) + n * 0.00021219444005469058)), n


@jit
def exponential(u):
    """exp(u), 0 where it is subnormal, ∞ from 88.3 on: exp2 of a fraction and of a whole number."""
    fraction, n = _split(u)
    return fraction * tl.exp2(n)


@jit
def exp_full(u):
    """exp(u) over the whole range of float32; Triton's own rounds u·log2(e), which loses 30 units at the ends."""
    fraction, n = _split(u)
    half = tl.floor(0.5 * n)  # 2^n may be more than the largest number
    return fraction * tl.exp2(half) * tl.exp2(n - half)


@jit
def exp_half(u):
    """exp(u) to 1e−7 (1 + |u|) relative, 0 where it is subnormal, for results of half precision."""
    return tl.exp2(1.4426950408889634 * u)


@jit
def expm1(u):
    """exp(u) − 1: Taylor's series where the subtraction would cancel, to 1e−8 relative."""
    series = _polynomial(u, (1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0))
    return tl.where(tl.abs(u) < 0.5, series * u, tl.exp(u) - 1.0)


@jit
def expm1_half(u):
    """exp(u) − 1 to 3e−6 (1 + |u|) relative, for results of half precision: by Taylor's series near 0."""
    series = _polynomial(u, (1.0 / 24, 1.0 / 6, 0.5, 1.0))
    return tl.where(tl.abs(u) < 0.125, series * u, exp_half(u) - 1.0)


@jit
def log1p(u):
    """log(1 + u): the logarithm of the rounded sum, and what the rounding dropped."""
    total = 1.0 + u
    dropped = u - (total - 1.0)
    # beyond 2^24 nothing is dropped, and at infinity the difference would be NaN
    return tl.log(total) + tl.where(tl.abs(u) < 16777216.0, dropped / total, 0.0)


@jit
def _log1p_unit(t):
    """log(1 + t) for t from 0 to 1: t times a polynomial that is minimax, to 5e−9 relative."""
    series = _polynomial(t, (
        -0.003244024468585849, 0.019851459190249443, -0.05695952847599983, 0.10603654384613037,
        -0.15305592119693756, 0.1967593878507614, -0.24954134225845337, 0.3332996368408203,
        -0.4999990165233612, 1.0,
    ))  # fmt: skip
    return series * t


@jit
def softplus(u):
    """log(1 + exp(u)), without overflow."""
    return tl.maximum(u, 0.0) + _log1p_unit(exponential(-tl.abs(u)))  # the second term is NaN for NaN


@jit
def softplus_half(u):
    """log(1 + exp(u)) to 1e−7 (1 + |u|) relative, for results of half precision."""
    return tl.maximum(u, 0.0) + _log1p_unit(tl.exp(-tl.abs(u)))


@jit
def _signed(size, u):
    """Return a size, 0 or more, with the sign of u."""
    bits = size.to(tl.int32, bitcast=True) | (u.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@jit
def _decay(u):
    """Return t = exp(−2|u|), and r and e with (1 + e) r = 1/(1 + t); a division would take more instructions."""
    t = exponential(-2.0 * tl.abs(u))
    root = tl.rsqrt(1.0 + t)
    r = root * root
    return t, r, 1.0 - (1.0 + t) * r


@jit
def tanh(u):
    """(1 − t)/(1 + t) with t = exp(−2|u|) and the sign of u; near 0 u times a polynomial in u², to 2e−8."""
    t, r, e = _decay(u)
    far = (1.0 - t) * r
    z = u * u
    series = _polynomial(z, (0.017241492867469788, -0.053045496344566345, 0.13325878977775574, -0.333331435918808))
    return tl.where(tl.abs(u) < 0.5, series * z * u + u, _signed(far + far * e, u))


@jit
def sech2(u):
    """1 / cosh² u."""
    t, r, e = _decay(u)
    about = 4.0 * t * (r * r)
    return about + about * (e + e)


@jit
def _decay_half(u):
    """Return q = 2t/(1 + t), r = 2/(1 + t); t = exp(−2|u|), to 1e−6 (1 + |u|): 1 − q is |tanh u|, q·r sech²."""
    t = tl.exp2(-2.8853900817779268 * tl.abs(u))
    root = tl.rsqrt(0.5 * t + 0.5)
    r = root * root
    return t * r, r


@jit
def tanh_half(u):
    """Tanh u to 1e−5 relative, for results of half precision: by Taylor's series near 0."""
    q, _ = _decay_half(u)
    return tl.where(tl.abs(u) > 0.0625, _signed(1.0 - q, u), u - 1.0 / 3 * u * u * u)


@jit
def sech2_half(u):
    """1 / cosh² u to 1e−6 (1 + |u|) relative, 0 where a factor is subnormal, for results of half precision."""
    q, r = _decay_half(u)
    return q * r


@jit
def sinh(u):
    """(exp(u) − exp(−u)) / 2: from expm1 near 0, and beyond by exp(|u| − log 2), which overflows as sinh does."""
    a = tl.abs(u)
    t = expm1(a)
    positive = tl.where(a < 9.0, 0.5 * (t + t / (t + 1.0)), exp_full(a - 0.6931471805599453))
    return tl.where(u < 0, -positive, positive)


@jit
def cosh(u):
    """(exp(u) + exp(−u)) / 2, overflowing where cosh does."""
    half = exp_full(tl.abs(u) - 0.6931471805599453)
    return half + 0.25 / half


@jit
def tsech2(u):
    """U / cosh² u, 0 where u overflows."""
    t = exp_full(-2.0 * tl.abs(u))
    return tl.where(t > 0, 4.0 * u * t / ((1.0 + t) * (1.0 + t)), tl.where(u == u, 0.0, u))


@jit
def logcosh(u):
    """log(cosh u): by cosh u = 1 + 2 sinh²(u/2) near 0, and by |u| − log 2 + log(1 + exp(−2|u|)) beyond."""
    a = tl.abs(u)
    s = sinh(0.5 * tl.where(a < 1.0, a, 1.0))
    return tl.where(a < 1.0, log1p(2.0 * s * s), a - 0.6931471805599453 + log1p(tl.exp(-2.0 * a)))


@jit
def asinh(u):
    """log(u + √(1 + u²)), without cancellation or overflow."""
    a = tl.abs(u)
    near = log1p(a + a * a / (1.0 + tl.sqrt(1.0 + a * a)))
    positive = tl.where(a >= 4096.0, tl.log(a) + 0.6931471805599453, near)
    return tl.where(u < 0, -positive, positive)


@jit
def tan(u):
    """Tan u."""
    return tl.sin(u) / tl.cos(u)


@jit
def atan(u):
    """Arc tangent, to 2e−8 relative: reduced to |w| <= tan(π/8), and there w times a polynomial in w²."""
    a = tl.abs(u)
    large = a > 2.414213562373095
    middle = (a > 0.4142135623730951) & (a <= 2.414213562373095)
    w = tl.where(large, -1.0 / a, tl.where(middle, (a - 1.0) / (a + 1.0), a))
    z = w * w
    series = _polynomial(z, (
        -0.06077993532284198, 0.10593729328106148, -0.14243522721325338, 0.19998470996954815, -0.3333331518091104,
    ))  # fmt: skip
    near = series * z * w + w
    positive = near + tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return tl.where(u < 0, -positive, positive)


@jit
def erfc(u):
    """1 − erf(u), relative to itself in the right tail too, to 5e−7 and the rounding of u² in the exponent.

    1 − u P(u²) for |u| < 0.9; beyond, exp(−u²) t Q(t) with t = 1/(1 + 0.4 |u|), reflected for u < 0. P and Q are
    minimax, to 2e−8 and 4e−8.
    """
    a = tl.abs(u)
    z = u * u
    near = _polynomial(z, (
        -0.0005961293936707079, 0.00498495576903224, -0.026759035885334015, 0.11281542479991913,
        -0.37612462043762207, 1.1283791065216064,
    ))  # fmt: skip
    t = 1.0 / (0.4 * a + 1.0)
    far = _polynomial(t, (
        -0.11625811457633972, 0.24358010292053223, 0.00831096712499857, 0.2130117416381836, 0.19879752397537231,
        0.22668975591659546, 0.22562721371650696,
    ))  # fmt: skip
    far = far * t * tl.exp(-z)
    return tl.where(a < 0.9, 1.0 - near * u, tl.where(u < 0, 2.0 - far, far))


@jit
def ndtr(u):
    """Φ(u) = erfc(−u/√2)/2, the normal distribution function."""
    return 0.5 * erfc(-0.7071067811865476 * u)


@jit
def ndtr_half(u):
    """Φ(u) to 6e−5 relative, for results of half precision: exp2 of a minimax polynomial, reflected for u > 0.

    Below −12.9, where it is subnormal, it may be 0.
    """
    a = tl.abs(u)
    log2 = _polynomial(a, (
        -2.0123906985247686e-09, 1.4528755798437487e-07, -4.617325430444907e-06, 8.553011866752058e-05,
        -0.0010343985632061958, 0.008723320439457893, -0.05408892035484314, -0.45863622426986694,
        -1.1510509252548218, -1.0000258684158325,
    ))  # fmt: skip
    left = tl.exp2(log2)
    return tl.where(u > 0, 1.0 - left, left)


@jit
def sigmoid(u):
    """1 / (1 + exp(−u)); 0 where it is subnormal."""
    return 1.0 / (1.0 + exponential(-u))


@jit
def sigmoid_half(u):
    """1 / (1 + exp(−u)) to 2e−7 (1 + |u|) relative, for results of half precision."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * u))


@jit
def _ratio(n):
    """W/(w + 2) with w = n(n + 2): tanh(log(1 + n))."""
    w = n * (n + 2.0)
    return w / (w + 2.0)


@jit
def tanh_softplus(u):
    """Tanh(log(1 + exp(u))); from u = 20 on it is 1."""
    return _ratio(exponential(tl.minimum(u, 20.0, propagate_nan=tl.PropagateNan.ALL)))


@jit
def tanh_softplus_half(u):
    """Tanh(log(1 + exp(u))) to 2e−7 (1 + |u|) relative, for results of half precision."""
    return _ratio(tl.exp2(1.4426950408889634 * tl.minimum(u, 20.0, propagate_nan=tl.PropagateNan.ALL)))


@jit
def hypot1(u):
    """√(1 + u²), which from 4096 on is |u| to float32."""
    a = tl.abs(u)
    return tl.where(a >= 4096.0, a, tl.sqrt(1.0 + a * a))


@jit
def isru(u):
    """U / √(1 + u²)."""
    return tl.where(tl.abs(u) >= 4096.0, sign(u), u / tl.sqrt(1.0 + u * u))


@jit
def squareplus(u):
    """(u + √(u² + 4)) / 2."""
    s = 2.0 * hypot1(0.5 * u)
    return tl.where(u > 0, 0.5 * u + 0.5 * s, 2.0 / (s - u))


@jit
def softsign(u):
    """U / (1 + |u|)."""
    return u / (1.0 + tl.abs(u))


@jit
def relu(u):
    """max(u, 0), NaN for NaN."""
    return tl.where(u < 0, 0.0, u)


@jit
def sign(u):
    """−1, 0 or 1."""
    return tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, 0.0))


@jit
def power(u, n: tl.constexpr):
    """U to the power of a positive integer, by repeated squaring."""
    if n == 1:
        return u
    else:
        half = power(u, n // 2)
        if n % 2 == 0:
            return half * half
        else:
            return half * half * u


@jit
def radical(d, order: tl.constexpr, side: tl.constexpr):
    """max(d, 0)^(1/order), of −d if `side` is −1; if it is 0, the root of |d| with the sign of d."""
    size = tl.abs(d) if side == 0 else tl.maximum(d * side, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if order == 2:
        size = tl.sqrt(size)
    elif order > 2:
        size = tl.exp2(tl.log2(size) * (1.0 / order))
    if side == 0:
        return tl.where(d < 0, -size, size)
    else:
        return size
