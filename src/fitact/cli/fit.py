"""The command `fitact fit`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitact.base import FitWarning, UsageError, quote, read_text, write

if TYPE_CHECKING:
    from fitact.fitter.numerics import Weight
    from fitact.fitter.records import AnyFit
from .names import check_function, known_functions
from .options import FILE, FITS, Finite, check_weight, completing, named, once, progress, read_weight, say

BEYOND = 0.01  # of a weight from data, beyond the domain: more is warned of


@click.command()
@click.option(
    "--fn",
    "functions",
    multiple=True,
    required=True,
    metavar="NAME|EXPR",
    shell_complete=completing(known_functions),
    help="Activation of the catalog (gelu, silu, ...) or an expression in x; or a gate (swiglu, geglu, ...) or a "
    "product of an expression in g and one in u. Repeatable.",
)
@click.option(
    "--bits",
    type=click.IntRange(0, 4),
    multiple=True,
    metavar="K",
    help="Required for fewbit and relumix; inverted uses as few as possible by default; output and recompute "
    "have none. Repeatable.",
)
@click.option(
    "--method",
    type=click.Choice(["fewbit", "relumix", "inverted", "output", "recompute"]),
    default="fewbit",
    help="fewbit: the best step function for the derivative. relumix: the slopes of the best mixture of ReLUs for "
    "the activation. inverted: the derivative as a function of the output and of the piece of x. output: the "
    "derivative as a function of the output alone, the catalog's or yours. recompute: exact; for a gate, saving g "
    "and u alone; for an expression with learned parameters, saving x alone.",
)
@click.option(
    "--domain",
    type=Finite(),
    nargs=2,
    metavar="A B",
    help="Interval to fit on.  [default: -10 10; for inverted, all reals]",
)
@click.option(
    "--weight",
    metavar="W",
    help="uniform, normal, normal(mean, deviation), student, student(freedom), student(freedom, mean, scale), "
    "histogram(edges; masses), an expression in x, or FILE.json#SITE of fitact calibrate, without #SITE if it has "
    "one.  [default: uniform]",
)
@click.option(
    "--param",
    "parameters",
    multiple=True,
    metavar="K=V",
    help="A parameter of the activation, e.g. negative_slope=0.2. Repeatable.",
)
@click.option(
    "--learn",
    "learned",
    multiple=True,
    metavar="K=V",
    help="A learned parameter of an expression and its start, e.g. beta=1.0, or with one for every channel "
    "gamma:channel=1.0. The method is then recompute. Repeatable.",
)
@click.option(
    "--objective",
    type=click.Choice(["primitive", "derivative"]),
    help="What relumix minimises: the distance from f or from its derivative.  [default: primitive]",
)
@click.option(
    "--tol", type=Finite(), metavar="E", help="Target error of the derivative for inverted.  [default: 8e-5]"
)
@click.option(
    "--family",
    type=click.Choice(["rational", "published"]),
    help="Approximants of inverted: quotients of polynomials, or the formulas and numbers of its paper (gelu, "
    "silu).  [default: rational]",
)
@click.option(
    "--derivative",
    metavar="EXPR",
    help="For output: the derivative as an expression in the output y; it is checked.  [default: the catalog's]",
)
@click.option(
    "--restarts", type=click.IntRange(0, 1000), metavar="N", help="Restarts of relumix's annealing.  [default: 4]"
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    help="Seed of relumix's annealing; fewbit is deterministic and only records it.",
)
@click.option(
    "--name",
    help="Name of the fit, its module and function.  [default: ACTIVATION_METHODBITS or ACTIVATION_output; "
    "required for an expression, for --param, and for a domain, weight, objective or tol other than the "
    "default]",
)
@click.option(
    "-o", "--output", type=FILE, metavar="FILE", help="Where to write.  [default: generated/fits/NAME.json]"
)
@click.option("--force", is_flag=True, help="Replace a different fit of the same name.")
def fit(
    functions: Sequence[str],
    bits: Sequence[int],
    method: str,
    domain: tuple[float, float] | None,
    weight: str | None,
    parameters: Sequence[str],
    learned: Sequence[str],
    objective: str | None,
    tol: float | None,
    family: str | None,
    derivative: str | None,
    restarts: int | None,
    seed: int,
    name: str | None,
    output: Path | None,
    force: bool,
) -> None:
    """Fit a cheap derivative to an activation and write it as JSON.

    \b
    Examples:
      fitact fit --fn gelu --bits 3
      fitact fit --fn gelu --fn silu --bits 2 --bits 3
      fitact fit --fn "x*sigmoid(1.5*x)" --bits 3 --name my_act
      fitact fit --fn leaky_relu --param negative_slope=0.2 --bits 1 --name leaky_relu02
      fitact fit --fn gelu --bits 2 --method relumix
      fitact fit --fn gelu --method inverted
      fitact fit --fn gelu --method inverted --family published
      fitact fit --fn tanh --method output
      fitact fit --fn "asinh(x)" --method output --derivative "1/cosh(y)" --name own_asinh
      fitact fit --fn gelu --bits 3 --weight "weights.json#act" --name gelu_act
      fitact fit --fn "tanh(g)*u" --method recompute --name tanh_gate
      fitact fit --fn "x*sigmoid(b*x)" --learn b=1 --method recompute --name own_swish
    """
    from fitact.fitter.catalog import CATALOG, DOMAINS, GATES, LEARNED, METHODS, RECORDED, check_name
    from fitact.fitter.files import FIT
    from fitact.fitter.syntax import Syntax

    weight = None if weight == "uniform" else weight
    numbers = named("--learn", map(_learned, learned))
    kind = _kind_of(method, functions, numbers)
    given: dict[str, Any] = {"bits": bits or None, "domain": domain, "weight": weight}
    given |= {"objective": objective, "tol": tol, "family": family, "derivative": derivative}
    given |= {"restarts": restarts, "seed": seed or None}
    own = METHODS[kind][method]
    _check_options(method, own, [option for option, value in given.items() if value is not None])
    values = named("--param", map(_parameter, parameters))
    widths: Sequence[int | None] = once(bits) or [None]
    if kind == "gates" and values:
        raise UsageError("a gate has no --param: write the numbers into the product")
    if kind == "formulas" and values:
        raise UsageError("a formula with learned parameters has no --param: write the numbers into the formula")
    functions = once(functions)
    for function in functions:
        check_function(kind, function, values, [*numbers])
    if len(functions) * len(widths) > 1 and (name or output):
        raise UsageError("--name and -o are for a single fit: give one --fn and one --bits with them")
    special = {
        "--param": bool(parameters),
        "--learn": bool(learned),
        "--domain": domain not in (None, DOMAINS.get(method)),
        "--weight": weight is not None,
        "--objective": objective == "derivative",
        "--tol": tol is not None,
        "--derivative": derivative is not None,
        "an expression": not {*CATALOG, *GATES, *LEARNED}.issuperset(functions),
    }
    if family == "published":
        if bits or domain or tol is not None or parameters or name:
            raise UsageError("--family published takes no --name, --bits, --domain, --tol or --param")
        if others := [function for function in functions if function not in ("gelu", "silu")]:
            raise UsageError(f"--family published: expected gelu or silu, got {quote(others[0])}")
    elif name is None and any(special.values()):
        what = next(option for option, given in special.items() if given)
        raise UsageError(f"--name is required for {what}: it names the file, the module and the function")
    if name is not None:
        check_name(name, "--name")
    if domain and not domain[0] < domain[1]:
        raise UsageError(f"domain: expected two numbers A < B, got {domain[0]!r} {domain[1]!r}")
    if weight is not None:
        check_weight(weight)
    if derivative is not None:
        Syntax(derivative, "derivative").check_names(("y",))

    from fitact.fitter.analysis import Activation, Gate, Learned
    from fitact.fitter.methods import make, published
    from fitact.fitter.records import InvertedFit, StepFit

    from .tables import fits as show_fits

    def read(function: str) -> Activation | Gate | Learned:
        if kind == "formulas":
            return Learned.of(function, numbers)
        return Gate.of(function) if kind == "gates" else Activation.of(function, values)

    jobs = [(read(function), k) for function in functions for k in widths]
    weighing = None if weight is None else read_weight(weight)

    given |= {"weight": weighing, "seed": seed}
    made: list[AnyFit] = []
    with progress(len(jobs), "fitting") as advance, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FitWarning)
        if weighing is not None and weighing.text != weight:
            _warn_of_domain(weighing, domain or DOMAINS[method])
        for i, (activation, k) in enumerate(jobs):
            given["bits"] = k
            if family == "published":
                made.append(published(f"{activation.name}_inverted_published"))
                continue
            options = {key: given[key] for key in own if given[key] is not None and key != "family"}
            if method in ("relumix", "inverted"):
                options["progress"] = lambda share, done=i: advance(done + share)
            fit = make(RECORDED[kind] + method, activation, name or f"{activation.name}_{method}", **options)
            if name is None and isinstance(fit, StepFit | InvertedFit):
                fit = replace(fit, name=f"{fit.name}{fit.bits}")
            made.append(fit)
            advance(i + 1)
    paths = [output or FITS / f"{fit.name}.json" for fit in made]
    for fit, path in zip(made, paths, strict=True):
        if not force and path.exists() and read_text(path, FIT.limit) != fit.to_json():
            raise UsageError(f"{path}: another fit of that name is there; use --force to replace it, or --name")
    for fit, path in zip(made, paths, strict=True):
        write(path, fit.to_json())
    for warning in caught:
        say(f"fitact: warning: {warning.message}", err=True)
    say("\n".join(show_fits(made)))
    for path in paths:
        say(f"wrote {path}")


def _kind_of(method: str, functions: Sequence[str], numbers: Mapping[str, tuple[float, bool]]) -> str:
    """Return whether the functions are activations, gates or formulas with learned parameters.

    If --learn is given, all are formulas. A mixture is refused, and a kind that the method does not take.
    """
    from fitact.fitter.catalog import LEARNED, METHODS, is_gate

    kinds: dict[str, str] = {}  # kind → the first function of it
    for function in functions:
        if numbers and is_gate(function):
            raise UsageError(f"--learn: expected an expression in x, got the gate {quote(function)}")
        learned = numbers or function in LEARNED
        kinds.setdefault("formulas" if learned else "gates" if is_gate(function) else "activations", function)
    if len(kinds) > 1:
        raise UsageError(f"--fn: expected functions of one kind, got {' and '.join(map(quote, kinds.values()))}")
    ((kind, function),) = kinds.items()
    if method not in METHODS[kind]:
        refusals = {
            "activations": "is for gates such as swiglu or silu(g)*u",
            "gates": "takes no gates",
            "formulas": "takes no learned parameters",
        }
        *others, last = METHODS[kind]
        of = f"{kind}{' with learned parameters' * (kind == 'formulas')}"
        those = f"the methods of {of} are {', '.join(others)} and {last}" if others else f"that of {of} is {last}"
        raise UsageError(f"--method {method} {refusals[kind]}, got {quote(function)}: {those}")
    return kind


def _warn_of_domain(weight: Weight, domain: tuple[float, float]) -> None:
    """Warn if much of a weight from data, whose integral is 1, lies beyond the domain."""
    if (beyond := 1 - weight.mass(*domain)) > BEYOND:
        low, high = domain
        part = f"{100 * beyond:.2g} % of the weight lies beyond the domain {low:g} {high:g}"
        warnings.warn(FitWarning(f"{part}: choose one with --domain"), stacklevel=2)


def _parameter(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UsageError(f"--param {quote(text)}: expected NAME=NUMBER") from None


def _learned(text: str) -> tuple[str, tuple[float, bool]]:
    name, equals, value = text.partition("=")
    name, colon, kind = map(str.strip, name.partition(":"))
    try:
        if not equals or kind != "channel" * bool(colon):
            raise ValueError
        return name, (float(value), bool(colon))
    except ValueError:
        raise UsageError(
            f"--learn {quote(text)}: expected NAME=START or NAME:channel=START, with a number to start from"
        ) from None


def _check_options(method: str, own: Sequence[str], given: Sequence[str]) -> None:
    """Refuse options that a method does not have, and a method without the bits that it needs."""
    from fitact.fitter.catalog import BITS_REQUIRED

    foreign = [f"--{option}" for option in given if option not in own]
    if foreign:
        takes = f"it takes {', '.join(f'--{option}' for option in own)}" if own else "nothing is fitted"
        raise UsageError(f"--method {method} has no {' or '.join(foreign)}: {takes}")
    if method in BITS_REQUIRED and "bits" not in given:
        raise UsageError(
            f"--bits is required for --method {method}: {BITS_REQUIRED[method]}, how many to save per element"
        )
