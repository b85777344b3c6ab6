"""The command `fitact fit`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitact.errors import FitWarning, UsageError, quote

if TYPE_CHECKING:
    from fitact.fitter.records.kinds import AnyFit
from .options import FILE, FITS, Finite, advance, named, once, progress


@click.command()
@click.option(
    "--fn",
    "functions",
    multiple=True,
    required=True,
    metavar="NAME|EXPR",
    help="Activation of the catalog (gelu, silu, ...) or an expression in x. Repeatable.",
)
@click.option(
    "--bits",
    type=int,
    multiple=True,
    metavar="K",
    help="1 to 4; for coded 3 to 8. Required for fewbit, relumix and coded; inverted uses as few as possible by "
    "default; exact has none. Repeatable.",
)
@click.option(
    "--method",
    type=click.Choice(["fewbit", "relumix", "inverted", "exact", "coded"]),
    default="fewbit",
    show_default=True,
    help="fewbit: the best step function for the derivative. relumix: the slopes of the best mixture of ReLUs for "
    "the activation. inverted: the derivative as a function of the output and of the piece of x. exact: the "
    "derivative as a function of the output alone. coded: a code of x that stands for value and derivative.",
)
@click.option(
    "--domain",
    type=Finite(),
    nargs=2,
    metavar="A B",
    help="Interval to fit on.  [default: -10 10; for coded, -64 64; for inverted, all reals]",
)
@click.option(
    "--weight",
    metavar="W",
    help="uniform, normal, normal(mean, deviation), student, student(freedom), student(freedom, mean, scale), or "
    "an expression in x.  [default: uniform; for coded, student(3)]",
)
@click.option(
    "--param",
    "parameters",
    multiple=True,
    metavar="K=V",
    help="A parameter of the activation, e.g. negative_slope=0.2. Repeatable.",
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
    type=click.Choice(["rational", "parametric"]),
    help="Approximants of inverted: quotients of polynomials, or those of its paper "
    "(gelu, silu).  [default: rational]",
)
@click.option("--restarts", type=int, metavar="N", help="Restarts of relumix's annealing.  [default: 4]")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of relumix's annealing; fewbit is deterministic and only records it; coded has none.",
)
@click.option(
    "--name",
    help="Name of the fit, its module and function.  [default: ACTIVATION_METHODBITS or ACTIVATION_exact; "
    "required for an expression, for --param, and for a domain, weight, objective, tol or family other than the "
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
    objective: str | None,
    tol: float | None,
    family: str | None,
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
      fitact fit --fn tanh --method exact
      fitact fit --fn silu --method coded --bits 8
    """
    from fitact.files import write
    from fitact.fitter.analysis.activation import Activation
    from fitact.fitter.methods.table import DOMAINS, OPTIONS, WEIGHTS, make
    from fitact.fitter.numerics.weight import Weight
    from fitact.fitter.records.fit import ExactFit, check_name

    from .tables import fits as show_fits

    if weight == WEIGHTS.get(method, "uniform"):
        weight = None
    _check_options(
        method,
        {
            "--bits": bool(bits),
            "--domain": domain is not None,
            "--weight": weight is not None,
            "--objective": objective is not None,
            "--tol": tol is not None,
            "--family": family is not None,
            "--restarts": restarts is not None,
            "--seed": seed != 0,
        },
    )
    values = named("--param", map(_parameter, parameters))
    widths: Sequence[int | None] = once(bits) or [None]
    jobs = [(Activation.of(function, values), k) for function in once(functions) for k in widths]
    if len(jobs) > 1 and (name or output):
        raise UsageError("--name and -o are for a single fit: give one --fn and one --bits with them")
    if family == "parametric" and (bits or domain or tol is not None):
        raise UsageError("--family parametric has one bit and no --bits, --domain or --tol")
    special = {
        "--param": bool(parameters),
        "--domain": domain not in (None, DOMAINS.get(method)),
        "--weight": weight is not None,
        "--objective": objective == "derivative",
        "--tol": tol is not None,
        "--family": family == "parametric",
        "an expression": not all(activation.name for activation, _ in jobs),
    }
    if name is None and any(special.values()):
        what = next(option for option, given in special.items() if given)
        raise UsageError(f"--name is required for {what}: it names the file, the module and the function")
    if name is not None:
        check_name(name, "--name")

    made: list[AnyFit] = []
    with progress(len(jobs), "fitting") as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FitWarning)
        for i, (activation, k) in enumerate(jobs):
            given: dict[str, Any] = {"bits": k, "domain": domain, "seed": seed}
            given |= {"weight": None if weight is None else Weight(weight)}
            given |= {"objective": objective, "restarts": restarts, "tol": tol, "family": family}
            options = {key: given[key] for key in OPTIONS[method] if given[key] is not None}
            if method in ("relumix", "inverted") and family != "parametric":
                options["progress"] = partial(advance, bar, i)
            one = make(method, activation, name or f"{activation.name}_{method}", **options)
            if name is None and not isinstance(one, ExactFit):
                one = replace(one, name=f"{one.name}{one.bits}")
            made.append(one)
            advance(bar, i, 1.0)
    paths = [output or FITS / f"{fit.name}.json" for fit in made]
    for one, path in zip(made, paths, strict=True):
        _check_replaceable(path, one, force)
    for one, path in zip(made, paths, strict=True):
        write(path, one.to_json())
    for warning in caught:
        click.echo(f"fitact: warning: {warning.message}", err=True)
    show_fits(made)
    for path in paths:
        click.echo(f"wrote {path}")


def _parameter(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"--param {quote(text)}: expected NAME=NUMBER") from None


def _check_replaceable(path: Path, fit: AnyFit, force: bool) -> None:
    from fitact.files import read_text
    from fitact.fitter.records.reading import MAX_BYTES

    if not force and path.exists() and read_text(path, MAX_BYTES) != fit.to_json():
        raise UsageError(f"{path}: another fit of that name is there; use --force to replace it, or --name")


def _check_options(method: str, given: Mapping[str, bool]) -> None:
    """Refuse options that a method does not have."""
    from fitact.fitter.methods.table import BITS_REQUIRED, OPTIONS

    own = [f"--{option}" for option in OPTIONS[method]]
    foreign = [option for option, present in given.items() if present and option not in own]
    if foreign:
        takes = f"it takes {', '.join(own)}" if own else "nothing is fitted"
        raise UsageError(f"--method {method} has no {' or '.join(foreign)}: {takes}")
    if method in BITS_REQUIRED and not given["--bits"]:
        raise UsageError(
            f"--bits is required for --method {method}: {BITS_REQUIRED[method]}, how many to keep per element"
        )
