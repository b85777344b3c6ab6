"""Activations from the literature that the catalog does not have: as a user writes them, and as mpmath does.

An oracle follows the paper's definition, branch by branch, and leaves accuracy to the number of digits that
`settled` works with: it takes more of them where 1 + erf(x/√2) or 1 + exp(x) cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpmath import atan, cos, cosh, mp, mpf, sign, sin, sqrt

Number = Any  # mpmath ships no types
Oracle = Callable[[Number], Number]

DIGITS = (60, 120, 240, 480)
AGREED = mpf("1e-15")  # relative difference of two settled values
NOTHING = mpf("1e-45")  # two values below are both taken as 0


@dataclass(frozen=True)
class Entry:
    """An activation: its name, its formula in the language, its definition, and where its derivative jumps."""

    name: str
    text: str
    oracle: Oracle
    corners: tuple[float, ...] = ()


def settled(compute: Oracle, at: float) -> Number:
    """Return a value that twice as many digits do not change."""
    last = mp.nan  # equal to nothing
    for digits in DIGITS:
        with mp.workdps(digits):
            value = compute(mpf(at))
            if abs(value - last) <= AGREED * abs(value) or max(abs(value), abs(last)) < NOTHING:
                return value
            last = value
    raise AssertionError(f"no value at {at!r} with {DIGITS[-1]} digits")


def derivative(oracle: Oracle) -> Oracle:
    """Return the derivative: central differences over 10^-digits, computed with twice the digits."""
    return lambda x: mp.diff(oracle, x)


# ------------------------------------------------------------------------------ what the definitions share


def exp(u: Number) -> Number:
    """exp(u), 0 far below anything that is tested: exp(−exp(10⁴)) has an exponent of 4000 digits."""
    assert u < 10**12, "larger than any definition here needs"
    return mp.exp(u) if u > -(10**6) else mpf(0)


def tanh(u: Number) -> Number:
    """tanh u, ±1 where the difference is below anything that is tested."""
    return mp.tanh(u) if abs(u) < 10**4 else mpf(sign(u))


def log(u: Number) -> Number:
    return mp.log(u)


def erf(u: Number) -> Number:
    return mp.erf(u)


def sigmoid(u: Number) -> Number:
    return 1 / (1 + exp(-u))


def softplus(u: Number) -> Number:
    return log(1 + exp(u))


def gelu(u: Number) -> Number:
    return u * (1 + erf(u / sqrt(2))) / 2


def clip(u: Number) -> Number:
    return min(max(u, mpf(0)), mpf(1))


def number(text: str) -> Number:
    """Return the decimal number that a formula writes, to all digits in use."""
    return mpf(text)


# ---------------------------------------------------------------------------------- definitions with branches


def elish(x: Number) -> Number:
    return x * sigmoid(x) if x >= 0 else (exp(x) - 1) * sigmoid(x)


def hard_elish(x: Number) -> Number:
    return (x if x >= 0 else exp(x) - 1) * clip((x + 1) / 2)


def sqnl(x: Number) -> Number:
    if abs(x) > 2:
        return mpf(sign(x))
    return x - sign(x) * x**2 / 4


def s_shaped_relu(x: Number) -> Number:
    if x >= 1:
        return 1 + (x - 1) / 2
    return -1 + (x + 1) / 5 if x <= -1 else x


def rsigelu(x: Number) -> Number:
    if x > 1:
        return x * sigmoid(x) / 2 + x
    return x if x >= 0 else (exp(x) - 1) / 2


def tanh_gelu(x: Number) -> Number:
    return x * (1 + tanh(sqrt(2 / mp.pi) * (x + number("0.044715") * x**3))) / 2


LITERATURE = (
    # ------------------------------------------------------------------------------ square roots and quotients
    # Barron, 2021
    Entry("squareplus", "(x + sqrt(x**2 + 4))/2", lambda x: (x + sqrt(x**2 + 4)) / 2),
    # known as the bent identity; Kunc & Kléma's survey, 2024
    Entry("bent_identity", "(sqrt(x**2 + 1) - 1)/2 + x", lambda x: (sqrt(x**2 + 1) - 1) / 2 + x),
    # Carlile et al., 2017
    Entry("isru", "x/sqrt(1 + x**2)", lambda x: x / sqrt(1 + x**2)),
    Entry("isrlu", "where(x >= 0, x, x/sqrt(1 + x**2))", lambda x: x if x >= 0 else x / sqrt(1 + x**2)),
    # Elliott, 1993
    Entry("elliott", "0.5*x/(1 + abs(x)) + 0.5", lambda x: x / (1 + abs(x)) / 2 + mpf(1) / 2),
    Entry("elliott_of_softsign", "0.5*softsign(x) + 0.5", lambda x: x / (1 + abs(x)) / 2 + mpf(1) / 2),
    # Pishchik, 2023
    Entry("scaled_softsign", "1.5*x/(0.5 + abs(x))", lambda x: 3 * x / (1 + 2 * abs(x))),
    # M. Zhu et al., 2021
    Entry("pflu", "x*(1 + x/sqrt(1 + x**2))/2", lambda x: x * (1 + x / sqrt(1 + x**2)) / 2),
    Entry(
        "fpflu",
        "where(x >= 0, x, x + x**2/sqrt(1 + x**2))",
        lambda x: x if x >= 0 else x + x**2 / sqrt(1 + x**2),
    ),
    # Biswas et al., 2021: the smooth maximum unit from a square root
    Entry(
        "smu_1",
        "((1 + 0.25)*x + sqrt((1 - 0.25)**2*x**2 + 0.5**2))/2",
        lambda x: (5 * x / 4 + sqrt(9 * x**2 / 16 + mpf(1) / 4)) / 2,
    ),
    # Vallés-Pérez et al., 2023
    Entry(
        "soft_modulus_q",
        "where(abs(x) <= 1, x**2*(2 - abs(x)), abs(x))",
        lambda x: x**2 * (2 - abs(x)) if abs(x) <= 1 else abs(x),
    ),
    # ------------------------------------------------------------------------------ tanh and inverse functions
    Entry("soft_modulus_t", "x*tanh(x/0.01)", lambda x: x * tanh(100 * x)),
    # LeCun et al., 1998
    Entry("lecun_tanh", "1.7159*tanh(2/3*x)", lambda x: number("1.7159") * tanh(2 * x / 3)),
    # Xu et al., 2016
    Entry(
        "penalized_tanh",
        "where(x > 0, tanh(x), 0.25*tanh(x))",
        lambda x: tanh(x) if x > 0 else tanh(x) / 4,
        (0.0,),
    ),
    # Roy et al., 2019
    Entry("lisht", "x*tanh(x)", lambda x: x * tanh(x)),
    # X. Liu & Di, 2020; Fernandez & Mali, 2024, call it TeLU
    Entry("tanhexp", "x*tanh(exp(x))", lambda x: x * tanh(exp(x))),
    # Biswas et al., 2021
    Entry("tanhsoft_1", "tanh(0.87*x)*log(1 + exp(x))", lambda x: tanh(number("0.87") * x) * softplus(x)),
    Entry("tanhsoft_2", "x*tanh(0.6*exp(x))", lambda x: x * tanh(number("0.6") * exp(x))),
    # textbook definitions
    Entry("tanh_written", "(exp(x) - exp(-x))/(exp(x) + exp(-x))", lambda x: mp.sinh(x) / cosh(x)),
    Entry("bipolar_sigmoid", "(1 - exp(-x))/(1 + exp(-x))", lambda x: (1 - exp(-x)) / (1 + exp(-x))),
    Entry("arctan", "atan(x)", atan),
    Entry("arcsinh", "asinh(x)", mp.asinh),
    # Kunc & Kléma's survey, 2024: x times the distribution function of Cauchy, and of Laplace
    Entry("calu", "x*(atan(x)/pi + 1/2)", lambda x: x * (atan(x) / mp.pi + mpf(1) / 2)),
    Entry(
        "lalu",
        "x*where(x >= 0, 1 - exp(-x)/2, exp(x)/2)",
        lambda x: x * (1 - exp(-x) / 2 if x >= 0 else exp(x) / 2),
    ),
    # -------------------------------------------------------------------------------------------- sigmoid
    Entry("sigmoid_written", "1/(1 + exp(-x))", lambda x: 1 / (1 + exp(-x))),
    Entry("sigmoid_quotient", "exp(x)/(1 + exp(x))", lambda x: 1 / (1 + exp(-x))),
    Entry("sigmoid_from_tanh", "(1 + tanh(x/2))/2", lambda x: (1 + tanh(x / 2)) / 2),
    # Ramachandran et al., 2017
    Entry("swish_beta", "x/(1 + exp(-1.5*x))", lambda x: x / (1 + exp(-3 * x / 2))),
    # Alcaide, 2018
    Entry("e_swish", "1.375*silu(x)", lambda x: number("1.375") * x * sigmoid(x)),
    # Elfwing et al., 2018
    Entry(
        "dsilu",
        "sigmoid(x)*(1 + x*(1 - sigmoid(x)))",
        lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x))),
    ),
    # Chieng et al., 2018
    Entry(
        "flatten_t_swish",
        "where(x >= 0, x*sigmoid(x) - 0.2, -0.2)",
        lambda x: (x * sigmoid(x) if x >= 0 else 0) - number("0.2"),
        (0.0,),
    ),
    # Seo et al., 2024
    Entry("swish_t", "x*sigmoid(x) + 0.1*tanh(x)", lambda x: x * sigmoid(x) + number("0.1") * tanh(x)),
    # Basirat & Roth, 2018
    Entry("elish", "where(x >= 0, x/(1 + exp(-x)), (exp(x) - 1)/(1 + exp(-x)))", elish),
    Entry(
        "hard_elish",
        "where(x >= 0, x*max(0, min(1, (x + 1)/2)), (exp(x) - 1)*max(0, min(1, (x + 1)/2)))",
        hard_elish,
        (-1.0, 1.0),
    ),
    # Patwardhan et al., 2018
    Entry("aria_2", "x*(1 + exp(-2*x))**(-1.5)", lambda x: x * (1 + exp(-2 * x)) ** mpf("-1.5")),
    # Chai et al., 2022
    Entry("eanaf", "x*exp(x)/(exp(x) + 2)", lambda x: x * exp(x) / (exp(x) + 2)),
    # Biswas et al., 2020: two members of the family EIS
    Entry(
        "eis_2",
        "x*log(1 + exp(x))/sqrt(1.16 + x**2)",
        lambda x: x * softplus(x) / sqrt(number("1.16") + x**2),
    ),
    Entry(
        "eis_3",
        "x/(1 + 0.68*exp(-1.7*x))",
        lambda x: x / (1 + number("0.68") * exp(-number("1.7") * x)),
    ),
    # Kılıçarslan & Celik, 2021
    Entry(
        "rsigelu",
        "where(x > 1, 0.5*x/(1 + exp(-x)) + x, where(x >= 0, x, 0.5*(exp(x) - 1)))",
        rsigelu,
        (0.0, 1.0),
    ),
    # Pishchik, 2023
    Entry(
        "delu",
        "where(x > 0, 1.5*x + abs(exp(-x) - 1), x*sigmoid(x))",
        lambda x: 3 * x / 2 + abs(exp(-x) - 1) if x > 0 else x * sigmoid(x),
        (0.0,),
    ),
    # ------------------------------------------------------------------------------------- softplus and log
    # Dugas et al., 2001
    Entry("softplus_written", "log(1 + exp(x))", softplus),
    Entry("softplus_sharp", "log(1 + exp(2*x))/2", lambda x: softplus(2 * x) / 2),
    Entry("logsigmoid_written", "log(1/(1 + exp(-x)))", lambda x: log(1 / (1 + exp(-x)))),
    # Schütt et al., 2017
    Entry("shifted_softplus", "log(0.5*exp(x) + 0.5)", lambda x: log(exp(x) / 2 + mpf(1) / 2)),
    # Zhao et al., 2018
    Entry(
        "softplus_linear",
        "where(x >= 0, x, 2*log((exp(x) + 1)/2))",
        lambda x: x if x >= 0 else 2 * log((exp(x) + 1) / 2),
    ),
    # Ciuparu et al., 2020
    Entry("soft_pp", "log(1 + exp(x)) + x/2 - log(2)", lambda x: softplus(x) + x / 2 - log(2)),
    # Klimek & Perelstein, 2018
    Entry(
        "soft_clipping",
        "log((1 + exp(5*x))/(1 + exp(5*(x - 1))))/5",
        lambda x: log((1 + exp(5 * x)) / (1 + exp(5 * (x - 1)))) / 5,
    ),
    # known from the loss of that name
    Entry("log_cosh", "log(cosh(x))", lambda x: log(cosh(x))),
    # Y. Liu et al., 2019
    Entry("nlrelu", "log(0.5*max(0, x) + 1)", lambda x: log(max(x, mpf(0)) / 2 + 1), (0.0,)),
    # Misra, 2019
    Entry("mish_written", "x*tanh(log(1 + exp(x)))", lambda x: x * tanh(softplus(x))),
    # Nag et al., 2021
    Entry("serf", "x*erf(log(1 + exp(x)))", lambda x: x * erf(softplus(x))),
    # H. Zhu et al., 2021
    Entry("logish", "x*log(1 + sigmoid(x))", lambda x: x * log(1 + sigmoid(x))),
    # X. Wang et al., 2022
    Entry("smish", "x*tanh(log(1 + sigmoid(x)))", lambda x: x * tanh(log(1 + sigmoid(x)))),
    # Kaytan et al., 2023
    Entry("gish", "x*log(2 - exp(-exp(x)))", lambda x: x * log(2 - exp(-exp(x)))),
    # -------------------------------------------------------------------------------------------- erf
    Entry("erf_unit", "erf(x)", erf),
    # Hendrycks & Gimpel, 2016
    Entry("gelu_written", "0.5*x*(1 + erf(x/sqrt(2)))", gelu),
    Entry("gelu_from_erfc", "0.5*x*erfc(-x/sqrt(2))", gelu),
    Entry(
        "gelu_tanh_written",
        "0.5*x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x**3)))",
        tanh_gelu,
    ),
    Entry(
        "gelu_tanh_from_exp",
        "x*(1 - 1/(exp(2*sqrt(2/pi)*(x + 0.044715*x**3)) + 1))",
        tanh_gelu,
    ),
    # Yu & Su, 2019
    Entry("sgelu", "x*erf(x/sqrt(2))", lambda x: x * erf(x / sqrt(2))),
    # Biswas et al., 2021: the smooth maximum unit
    Entry(
        "smu",
        "((1 + 0.25)*x + (1 - 0.25)*x*erf((1 - 0.25)*x))/2",
        lambda x: (5 * x / 4 + 3 * x / 4 * erf(3 * x / 4)) / 2,
    ),
    # Rajanand & Singh, 2023
    Entry("erf_relu", "where(x >= 0, x, 0.5*erf(x))", lambda x: x if x >= 0 else erf(x) / 2, (0.0,)),
    # Naveen, 2022
    Entry("phish", "x*tanh(gelu(x))", lambda x: x * tanh(gelu(x))),
    # ---------------------------------------------------------------------------------------- exponentials
    # Kong & Takatsuka, 2017
    Entry(
        "hexpo",
        "where(x >= 0, -(exp(-x) - 1), 2*(exp(x/3) - 1))",
        lambda x: 1 - exp(-x) if x >= 0 else 2 * (exp(x / 3) - 1),
        (0.0,),
    ),
    # Gomes & Ludermir, 2008
    Entry("loglog", "exp(-exp(-x))", lambda x: exp(-exp(-x))),
    Entry("cloglog", "1 - exp(-exp(x))", lambda x: 1 - exp(-exp(x))),
    # Broomhead & Lowe, 1988
    Entry("gaussian", "exp(-x**2)", lambda x: exp(-(x**2))),
    # Zhang & Benveniste, 1992; Alexandridis & Zapranis, 2013: wavelets
    Entry("gaussian_wavelet", "-x*exp(-x**2/2)", lambda x: -x * exp(-(x**2) / 2)),
    Entry("mexican_hat", "(1 - x**2)*exp(-x**2/2)", lambda x: (1 - x**2) * exp(-(x**2) / 2)),
    Entry("morlet", "cos(1.75*x)*exp(-x**2/2)", lambda x: cos(7 * x / 4) * exp(-(x**2) / 2)),
    # Njikam & Zhao, 2016
    Entry("resech", "2*x/(exp(x) + exp(-x))", lambda x: x / cosh(x)),
    # Trottier et al., 2017
    Entry("pelu", "where(x >= 0, x/2, elu(x/2))", lambda x: x / 2 if x >= 0 else exp(x / 2) - 1),
    # Ying et al., 2019
    Entry("reu", "where(x > 0, x, x*exp(x))", lambda x: x if x > 0 else x * exp(x)),
    # Vagerwal, 2021
    Entry("colu", "x/(1 - x*exp(-(x + exp(x))))", lambda x: x / (1 - x * exp(-(x + exp(x))))),
    # Zhou et al., 2020: the denominator has no zero, for 2·e/3 > 1
    Entry("soft_root_sign", "x/(x/2 + exp(-x/3))", lambda x: x / (x / 2 + exp(-x / 3))),
    # Huang & Schlag, 2025
    Entry(
        "xielu",
        "where(x > 0, 0.8*x**2 + 0.5*x, (expm1(min(x, 0)) - x)*0.8 + 0.5*x)",
        lambda x: (4 * x**2 if x > 0 else 4 * (exp(x) - 1 - x)) / 5 + x / 2,
    ),
    # ------------------------------------------------------------------------------------------ oscillating
    # Sopena et al., 1999
    Entry("sine", "sin(x)", sin),
    # Noel et al., 2021
    Entry("gcu", "x*cos(x)", lambda x: x * cos(x)),
    # Rahman et al., 2023
    Entry("asu", "x*sin(x)", lambda x: x * sin(x)),
    # Ziyin et al., 2020
    Entry("snake", "x + sin(x)**2", lambda x: x + sin(x) ** 2),
    # Paul et al., 2022
    Entry("sinlu", "(x + 0.5*sin(x))*sigmoid(x)", lambda x: (x + sin(x) / 2) * sigmoid(x)),
    # Pishchik, 2023
    Entry("coslu", "(x + cos(x))*sigmoid(x)", lambda x: (x + cos(x)) * sigmoid(x)),
    # Rodrigues, 2018
    Entry(
        "sine_relu",
        "where(x > 0, x, 0.0025*(sin(x) - cos(x)))",
        lambda x: x if x > 0 else (sin(x) - cos(x)) / 400,
        (0.0,),
    ),
    # ---------------------------------------------------------------------------------- pieces of polynomials
    # Wuraola & Patel, 2018
    Entry(
        "sqnl",
        "where(x > 2, 1, where(x >= 0, x - x**2/4, where(x >= -2, x + x**2/4, -1)))",
        sqnl,
    ),
    # Jin et al., 2016
    Entry(
        "s_shaped_relu",
        "where(x >= 1, 1 + 0.5*(x - 1), where(x <= -1, -1 + 0.2*(x + 1), x))",
        s_shaped_relu,
        (-1.0, 1.0),
    ),
    # Nicolae, 2018
    Entry(
        "plu",
        "max(0.1*(x + 1) - 1, min(0.1*(x - 1) + 1, x))",
        lambda x: max((x + 1) / 10 - 1, min((x - 1) / 10 + 1, x)),
        (-1.0, 1.0),
    ),
    # Yu et al., 2022
    Entry(
        "star_relu",
        "0.8944*relu(x)**2 - 0.4472",
        lambda x: number("0.8944") * max(x, mpf(0)) ** 2 - number("0.4472"),
    ),
    # Misra's hard variant of Mish
    Entry(
        "hard_mish",
        "x/2*min(2, max(0, x + 2))",
        lambda x: x / 2 * min(mpf(2), max(mpf(0), x + 2)),
        (-2.0,),
    ),
    # Howard et al., 2019
    Entry("hard_swish_of_relu6", "x*relu6(x + 3)/6", lambda x: x * clip((x + 3) / 6), (-3.0, 3.0)),
    # Noel et al., 2021
    Entry("ncu", "x - x**3", lambda x: x - x**3),
    Entry("squ", "x**2 + x", lambda x: x**2 + x),
)
