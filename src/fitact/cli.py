"""The command line: `fit`, `codegen`, `plot`, `show`, `memory`.

Errors are one line on standard error: status 2 for wrong use, 1 for a job that failed. The commands import
what they need when they run, so that `--help` is instant.
"""

from __future__ import annotations

import sys
import warnings
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitact.errors import FitactError, FitWarning, UsageError, quote
from fitact.files import reason

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from fitact.fitter.fit import AnyFit

FITS = Path("generated/fits")
PATH = click.Path(path_type=Path)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with:  fitact fit --fn gelu --bits 3  &&  fitact codegen  &&  fitact plot",
)
@click.version_option(package_name="fitact", message="%(prog)s %(version)s")
def cli() -> None:
    """Make PyTorch activations that keep a few bits per element for backward."""


@cli.command()
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
    help="1 to 4, required for fewbit and relumix; inverted takes as few as will do by default, exact has none. "
    "Repeatable.",
)
@click.option(
    "--method",
    type=click.Choice(["fewbit", "relumix", "inverted", "exact"]),
    default="fewbit",
    show_default=True,
    help="fewbit: the best step function for the derivative. relumix: the slopes of the best mixture of ReLUs for "
    "the activation. inverted: the derivative as a function of the output and of the piece of x. exact: the "
    "derivative as a function of the output alone.",
)
@click.option(
    "--domain",
    type=float,
    nargs=2,
    metavar="A B",
    help="Interval to fit on.  [default: -10 10; for inverted the reals]",
)
@click.option(
    "--weight",
    default="uniform",
    show_default=True,
    metavar="W",
    help="uniform, normal, normal(mean, deviation), or an expression in x.",
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
    "--tol", type=float, metavar="E", help="Error of the derivative that inverted aims at.  [default: 8e-5]"
)
@click.option(
    "--family",
    type=click.Choice(["rational", "parametric"]),
    help="What inverted fits: quotients of polynomials, or its paper's forms (gelu, silu).  [default: rational]",
)
@click.option("--restarts", type=int, metavar="N", help="Of the annealing of relumix.  [default: 4]")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of the annealing of relumix; fewbit, which is deterministic, records it.",
)
@click.option(
    "--name",
    help="Name of the fit, its module and function.  [default: ACTIVATION_METHODBITS or ACTIVATION_exact; "
    "required for an expression, for --param and for another domain, weight, objective, tol or family]",
)
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", help="Where to write.  [default: generated/fits/NAME.json]"
)
@click.option("--force", is_flag=True, help="Replace a different fit of the same name.")
def fit(
    functions: Sequence[str],
    bits: Sequence[int],
    method: str,
    domain: tuple[float, float] | None,
    weight: str,
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
    """
    from fitact.codegen.generate import check_free
    from fitact.files import write
    from fitact.fitter import fewbit
    from fitact.fitter.activation import Activation
    from fitact.fitter.fit import ExactFit, check_name
    from fitact.fitter.methods import OPTIONS, make
    from fitact.fitter.weight import Weight
    from fitact.show import fits as show_fits

    _check_options(
        method,
        {
            "--bits": bool(bits),
            "--domain": domain is not None,
            "--weight": weight != "uniform",
            "--objective": objective is not None,
            "--tol": tol is not None,
            "--family": family is not None,
            "--restarts": restarts is not None,
            "--seed": seed != 0,
        },
    )
    values = dict(_parameter(text) for text in parameters)
    widths: Sequence[int | None] = bits or [None]
    jobs = [(Activation.of(function, values), k) for function in functions for k in widths]
    if len(jobs) > 1 and (name or output):
        raise UsageError("--name and -o are for a single fit: give one --fn and one --bits with them")
    if family == "parametric" and (bits or domain or tol is not None):
        raise UsageError("--family parametric has one bit and no --bits, --domain or --tol")
    special = {
        "--param": bool(parameters),
        "--domain": domain not in (None, fewbit.DOMAIN) or (method == "inverted" and domain is not None),
        "--weight": weight != "uniform",
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
        check_free(name)

    made: list[AnyFit] = []
    with _progress(len(jobs), "fitting") as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FitWarning)
        for i, (activation, k) in enumerate(jobs):
            given: dict[str, Any] = {"bits": k, "domain": domain, "weight": Weight(weight), "seed": seed}
            given |= {"objective": objective, "restarts": restarts, "tol": tol, "family": family}
            options = {key: given[key] for key in OPTIONS[method] if given[key] is not None}
            if method in ("relumix", "inverted") and family != "parametric":
                options["progress"] = partial(_advance, bar, i)
            one = make(method, activation, name or f"{activation.name}_{method}", **options)
            if name is None and not isinstance(one, ExactFit):
                one = replace(one, name=f"{one.name}{one.bits}")
            made.append(one)
            _advance(bar, i, 1.0)
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


@cli.command()
@click.argument("fits", nargs=-1, type=PATH, metavar="[FITS]...")
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="Package to write.  [default: generated; with --standalone, standalone]",
)
@click.option("--check", is_flag=True, help="Write nothing; show what would change, and fail if anything would.")
@click.option(
    "--standalone",
    "alone",
    is_flag=True,
    help="Write files that need PyTorch and no fitact, each to be copied alone into another project.",
)
def codegen(fits: Sequence[Path], out: Path | None, check: bool, alone: bool) -> None:
    """Generate a PyTorch module from each fit.

    FITS are fit files; by default all in generated/fits, and then modules whose fit is gone are removed.

    \b
    Examples:
      fitact codegen
      fitact codegen --check
      fitact codegen my_fit.json --out my_package
      fitact codegen --standalone
      fitact codegen my_fit.json --standalone --out my_project
    """
    from fitact.codegen.generate import drift, generate, plan

    files = plan(_read(fits), alone=alone)
    folder = out or Path("standalone" if alone else "generated")
    modules = len(files.keys() - {"__init__.py"})
    prune = not fits
    if check:
        difference = drift(files, folder, prune=prune, alone=alone)
        if difference:
            click.echo(difference, nl=False)
            command = f"fitact codegen{' --standalone' if alone else ''}"
            raise FitactError(f"{folder}: differs from what its fits generate; run {command}")
        click.echo(f"{folder}: {modules} modules are what their fits generate")
        return
    changed = generate(files, folder, prune=prune, alone=alone)
    for path in changed:
        click.echo(f"{'wrote' if path.exists() else 'removed'} {path}")
    if not changed:
        click.echo(f"{folder}: nothing to do, {modules} modules are up to date")


@cli.command()
@click.argument("fits", nargs=-1, type=PATH, metavar="[FITS]...")
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="PNG, SVG or PDF.  [default: NAME.png, or fits.png for several]",
)
def plot(fits: Sequence[Path], output: Path | None) -> None:
    """Draw derivative, step function and error of fits.

    FITS are fit files; by default all in generated/fits, in one figure.

    \b
    Examples:
      fitact plot
      fitact plot generated/fits/gelu_fewbit3.json -o gelu.svg
    """
    from fitact.files import write
    from fitact.fitter.plot import draw

    read = _read(fits)
    path = output or Path(f"{read[0].name}.png" if len(read) == 1 else "fits.png")
    kind = path.suffix[1:].lower()
    if kind not in ("png", "svg", "pdf"):
        raise UsageError(f"{path}: expected a file name that ends in .png, .svg or .pdf")
    write(path, draw(read, kind))
    click.echo(f"wrote {path}")


@cli.command()
@click.argument("things", nargs=-1, metavar="[ACTIVATION | FITS...]")
def show(things: Sequence[str]) -> None:
    """Show the catalog, an activation, or fits side by side.

    Without arguments the catalog. ACTIVATION is a name of the catalog or an expression in x; FITS are fit files,
    whose names end in .json.

    \b
    Examples:
      fitact show
      fitact show hardtanh
      fitact show "x*tanh(exp(x))"
      fitact show generated/fits/gelu_fewbit2.json generated/fits/gelu_fewbit3.json
    """
    from fitact import show as print_
    from fitact.fitter.activation import Activation
    from fitact.fitter.fit import read

    if not things:
        print_.catalog()
    elif all(thing.endswith(".json") for thing in things):
        print_.fits([read(Path(thing)) for thing in things])
    elif len(things) == 1:
        print_.activation(Activation.of(things[0]))
    else:
        raise UsageError("show takes one activation, or fit files whose names end in .json")


@cli.command()
@click.argument("call", required=False, metavar="[MODULE:CALLABLE]")
@click.option("--hf", metavar="TYPE", help="Model type of transformers, e.g. llama, bert, vit; random weights.")
@click.option("--timm", metavar="NAME", help="Model of timm, e.g. efficientnet_b0; random weights.")
@click.option(
    "--set", "sizes", multiple=True, metavar="K=V", help="A size of --hf, e.g. num_hidden_layers=24. Repeatable."
)
@click.option(
    "--head",
    type=click.Choice(["none", "causal-lm", "masked-lm", "sequence", "image"]),
    help="Of --hf, with its loss.  [default: by the model]",
)
@click.option(
    "--attention",
    type=click.Choice(["sdpa", "eager"]),
    help="Of --hf: fused, or composed of operations.  [default: fused]",
)
@click.option("--image", type=click.IntRange(1), metavar="N", help="Height and width of images, in pixels.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, metavar="N")
@click.option("--seq", type=click.IntRange(1), default=512, show_default=True, metavar="N", help="Tokens a row.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of parameters and inputs.  [default: bfloat16; with --autocast, float32]",
)
@click.option("--autocast", type=click.Choice(["bfloat16", "float16"]), help="What autocast casts to.")
@click.option(
    "--lora",
    metavar="NAMES",
    help="Train adapters alone, on linear layers of these names, q_proj,v_proj, or on all of the blocks.",
)
@click.option("--rank", type=click.IntRange(1), default=8, show_default=True, metavar="R", help="Of the adapters.")
@click.option(
    "--freeze", multiple=True, metavar="PATTERN", help="Parameters not to train, e.g. 'embeddings.*'. Repeatable."
)
@click.option(
    "--bits",
    type=click.IntRange(1, 4),
    multiple=True,
    default=(3,),
    show_default=True,
    metavar="K",
    help="Of fewbit. Repeatable.",
)
@click.option(
    "--budget",
    "budgets",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(1.0, 0.7),
    show_default=True,
    metavar="B",
    help="activation_memory_budget of the compiler. Repeatable.",
)
@click.option("--no-compiler", is_flag=True, help="Leave the compiler out, which takes most of the time.")
@click.option(
    "--gib",
    type=click.FloatRange(0, min_open=True),
    metavar="G",
    help="Also find the largest batch and the longest sequence that fit so many GiB.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "sgd", "none"]),
    default="adamw",
    show_default=True,
    help="Whose state has to fit too; sgd is with momentum.",
)
@click.option("--peak", is_flag=True, help="Also track the peak of a training step; minutes for large models.")
@click.option("--bytes", "exact", is_flag=True, help="Print bytes, not MiB.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Draw a bar chart: PNG, SVG or PDF.")
@click.option("--json", "numbers", type=PATH, metavar="FILE", help="Write all numbers as JSON.")
def memory(
    call: str | None,
    hf: str | None,
    timm: str | None,
    sizes: Sequence[str],
    head: str | None,
    attention: str | None,
    image: int | None,
    batch: int,
    seq: int,
    dtype: str | None,
    autocast: str | None,
    lora: str | None,
    rank: int,
    freeze: Sequence[str],
    bits: Sequence[int],
    budgets: Sequence[float],
    no_compiler: bool,
    gib: float | None,
    optimizer: str,
    peak: bool,
    exact: bool,
    output: Path | None,
    numbers: Path | None,
) -> None:
    """Measure what a model keeps for backward, and what each remedy would save.

    The model is built without memory and run on tensors without data; nothing is downloaded. MODULE:CALLABLE is a
    function of yours that returns a model and its inputs; it may take batch and seq.

    \b
    Examples:
      fitact memory --hf llama --seq 2048 --lora q_proj,v_proj --gib 24
      fitact memory --hf bert --set num_hidden_layers=24 --batch 32 -o bert.png
      fitact memory --timm efficientnet_b0 --batch 64
      fitact memory my_models:tiny --batch 8 --json tiny.json
    """
    from fitact import report as report_
    from fitact.files import write
    from fitact.runtime.memory_report import measure
    from fitact.runtime.models import Training
    from fitact.runtime.models_sources import from_callable, hugging_face, timm_model

    if sum(given is not None for given in (call, hf, timm)) != 1:
        raise UsageError("memory takes one model: MODULE:CALLABLE, --hf TYPE or --timm NAME")
    foreign = {"--set": bool(sizes), "--head": head is not None, "--attention": attention is not None}
    for option, given in foreign.items():
        if given and hf is None:
            raise UsageError(f"{option} is for --hf")
    if image is not None and call is not None:
        raise UsageError(f"--image is for --hf and --timm: {call} makes its own inputs")
    kind = "" if output is None else output.suffix[1:].lower()
    if output is not None and kind not in ("png", "svg", "pdf"):
        raise UsageError(f"{output}: expected a file name that ends in .png, .svg or .pdf")
    if hf is not None:
        source = hugging_face(hf, dict(_size(text) for text in sizes), head=head, attention=attention, image=image)
    else:
        source = timm_model(timm, image=image) if timm is not None else from_callable(call or "")
    layers = tuple(name.strip() for name in (lora or "").split(",") if name.strip())
    with _progress(1, "measuring") as bar:
        report = measure(
            source,
            training=Training(layers, rank, tuple(freeze)),
            batch=batch,
            seq=seq,
            dtype=dtype,
            autocast=autocast,
            bits=bits,
            budgets=() if no_compiler else budgets,
            gib=gib,
            optimizer=optimizer,
            peak=peak,
            progress=partial(_advance, bar, 0),
        )
    if output is not None:
        write(output, report_.draw(report, kind))
    if numbers is not None:
        write(numbers, report.to_json())
    report_.show(report, exact=exact)
    for path in (output, numbers):
        if path is not None:
            click.echo(f"wrote {path}")


def _size(text: str) -> tuple[str, Any]:
    name, mark, value = text.partition("=")
    if not name or not mark:
        raise UsageError(f"--set {quote(text)}: expected NAME=VALUE")
    try:
        return name, literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _parameter(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"--param {quote(text)}: expected NAME=NUMBER") from None


def _read(paths: Sequence[Path]) -> list[AnyFit]:
    from fitact.fitter.fit import read

    found = list(paths) or sorted(FITS.glob("*.json"))
    if not found:
        raise UsageError(f"{FITS}: no fits there; make one first, for example: fitact fit --fn gelu --bits 3")
    return [read(path) for path in found]


def _check_replaceable(path: Path, fit: AnyFit, force: bool) -> None:
    from fitact.files import read_text
    from fitact.fitter.fit import MAX_BYTES

    if not force and path.exists() and read_text(path, MAX_BYTES) != fit.to_json():
        raise UsageError(f"{path}: another fit of that name is there; use --force to replace it, or --name")


def _check_options(method: str, given: Mapping[str, bool]) -> None:
    """Refuse options that mean nothing to a method."""
    from fitact.fitter.methods import BITS_REQUIRED, OPTIONS

    own = [f"--{option}" for option in OPTIONS[method]]
    foreign = [option for option, present in given.items() if present and option not in own]
    if foreign:
        takes = f"it takes {', '.join(own)}" if own else "nothing is fitted"
        raise UsageError(f"--method {method} has no {' or '.join(foreign)}: {takes}")
    if method in BITS_REQUIRED and not given["--bits"]:
        raise UsageError(f"--bits is required for --method {method}: 1 to 4, how many to keep per element")


STEPS = 1000  # of the progress bar, for each fit


def _progress(jobs: int, label: str) -> ProgressBar[int]:
    """Return a progress bar over that many fits, shown where somebody watches."""
    return click.progressbar(length=jobs * STEPS, label=label, file=sys.stderr, hidden=not sys.stderr.isatty())


def _advance(bar: ProgressBar[int], fits: int, share: float) -> None:
    """Move the bar to so many whole fits and a share of the next."""
    bar.update(max(0, round((fits + share) * STEPS) - bar.pos))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        return cli.main(arguments, prog_name="fitact", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "fitact"
        return _fail(f"{error.format_message()} (see {command} --help)", 2)
    except click.Abort:
        return _fail("interrupted", 130)
    except FitactError as error:
        return _fail(str(error), error.exit_status)
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {reason(error)}", 1)


def _fail(message: str, status: int) -> int:
    click.echo("fitact: " + " ".join(message.split()), err=True)
    return status
