"""Build the reference: commands.md from `--help`, api.md from docstrings, gallery.md from the shipped fits.

Tables between the marks of other pages are those of `benchmarks/tables.py`.

    python docs/build.py [--check] [--pictures]

Without `--pictures`, only missing pictures are drawn. `--check` writes nothing and fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import griffe
from click.testing import CliRunner
from griffe2md import render_object_docs

from fitact.cli import cli
from fitact.cli.tables import starts
from fitact.fitter.catalog import CATALOG
from fitact.fitter.plot import draw
from fitact.fitter.records import AnyFit, GateFit, InvertedFit, LearnedFit, OutputFit, StepFit, read

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GALLERY = DOCS / "gallery"
DPI = 75
WIDTH = 100  # of a help text
ROOMS = ("base", "fitter", "codegen", "runtime", "generated")
METHODS = ("fewbit", "relumix", "inverted", "output", "gate_recompute", "learned_recompute")
# What api.md describes: a heading, a sentence, and the objects.
API: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Using activations",
        "What ships, and models converted to it.",
        (
            "activation",
            "saving",
            "checkpoint",
            "hooks",
            "convert",
            "revert",
            "verify",
            "runtime.choose.verify.Verification",
        ),
    ),
    (
        "Norms",
        "Norms that save their output and one number per row, and one merged into the layers that read it.",
        (
            "runtime.norms.MSLayerNorm",
            "runtime.norms.MSRMSNorm",
            "runtime.norms.ms_layer_norm",
            "runtime.norms.ms_rms_norm",
            "runtime.norms.merge_norm",
        ),
    ),
    (
        "Compiling",
        "`torch.compile` that saves codes for backward. See compiler.md.",
        (
            "runtime.compile.compile",
            "runtime.compile.compile_options",
            "runtime.compile.compile_report",
            "runtime.compile.CompileReport",
            "runtime.compile.SavedRecord",
        ),
    ),
    (
        "Measuring",
        "What autograd saves, and what it would save with each method and baseline.",
        (
            "runtime.measure.count_saved",
            "runtime.measure.Saved",
            "runtime.measure.SavedStorage",
            "runtime.measure.Meter",
            "runtime.measure.Work",
            "runtime.choose.measure",
            "runtime.choose.Report",
            "runtime.choose.Row",
            "runtime.measure.Training",
            "runtime.measure.hugging_face",
            "runtime.measure.timm_model",
            "runtime.measure.from_callable",
        ),
    ),
    (
        "Planning",
        "How to train each block of a model within a memory. See plan.md.",
        (
            "plan",
            "planner",
            "load_plan",
            "planning.Planner",
            "planning.Planner.plan",
            "planning.Planner.least",
            "planning.Plan",
            "planning.Plan.apply",
            "planning.Plan.save",
            "base.reports.Shown.to_dict",
            "base.reports.Shown.plot",
            "planning.Group",
            "planning.Point",
            "runtime.measure.Device",
            "runtime.measure.measured",
        ),
    ),
    (
        "Fitting",
        "From a formula to a fit, and its JSON. None of this imports PyTorch.",
        (
            "fitter.analysis.Activation",
            "fitter.numerics.Weight",
            "fitter.methods.fewbit.fit",
            "fitter.methods.relumix.fit",
            "fitter.methods.relumix.published",
            "fitter.methods.inverted.fit",
            "fitter.methods.inverted_published.published",
            "fitter.methods.output.fit",
            "fitter.records.read",
            "fitter.records.from_json",
            "fitter.records.StepFit",
            "fitter.records.InvertedFit",
            "fitter.records.OutputFit",
            "fitter.plot.draw",
        ),
    ),
    (
        "Calibrating",
        "What goes into a model's activations, as weights for fits.",
        (
            "calibrate",
            "fitter.records.Calibration",
            "fitter.records.Calibration.weight",
            "fitter.records.Calibration.to_json",
            "fitter.records.Site",
            "fitter.records.read_weights",
        ),
    ),
    (
        "Generating",
        "From fits to source text.",
        (
            "codegen.generate.render",
            "codegen.generate.plan",
            "codegen.bundle.plan",
            "codegen.generate.generate",
        ),
    ),
    (
        "Errors",
        "The exceptions that fitact raises on purpose.",
        ("FitactError", "UsageError", "JobError", "FitWarning"),
    ),
)
STYLE = {"heading_level": 3, "show_signature_annotations": True, "members": False, "summary": False}


def commands() -> str:
    """Return the page of the command line: what `--help` prints."""
    completion = (
        "Options, and names of activations, methods, model types and devices, complete with the tab key after\n"
        '`eval "$(_FITACT_COMPLETE=bash_source fitact)"`, in zsh with `zsh_source`. Where there is no terminal,\n'
        "long work prints a line to standard error every ten seconds. `-o` writes the result, `--plot` draws it."
    )
    parts = ["# Commands", "What `fitact --help` and each command's help print.", completion, _help()]
    for name in sorted(cli.commands):
        parts += [f"## {name}", _help(name)]
    return _page(parts)


def _help(*command: str) -> str:
    result = CliRunner().invoke(
        cli, [*command, "--help"], prog_name="fitact", terminal_width=WIDTH, max_content_width=WIDTH
    )
    return f"```text\n{result.output.strip()}\n```"


def api() -> str:
    """Return the page of the Python interface: signatures and docstrings."""
    package = _package()
    parts = ["# Python interface", "Signatures and docstrings. Names are relative to `fitact`."]
    for heading, sentence, names in API:
        parts += [f"## {heading}", sentence]
        for name in names:
            documented = package[name]
            folder = documented.parent
            if documented.is_module:  # of the same name as the function in it
                documented = documented[name.rpartition(".")[2]]
            if documented.is_alias:
                documented = documented.final_target
            documented.parent = folder  # which exports it
            text = render_object_docs(documented, dict(STYLE))
            # links to other packages and to attributes are dead here; HTML anchors are noise on GitHub
            text = re.sub(r"\[([^\[\]]*)\]\(#[^)]*\)", r"\1", text)
            parts.append(re.sub(r"</?code>", "`", text).replace("`fitact.", "`").strip())
    return _page(parts)


def _package() -> griffe.Object:
    """Load the folders that are installed as one package with griffe."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "fitact"
        package.mkdir()
        for source in [*(ROOT / "src" / "fitact").iterdir(), *(ROOT / name for name in ROOMS)]:
            (package / source.name).symlink_to(source)
        loader = griffe.GriffeLoader(
            docstring_parser="google",
            docstring_options={"returns_multiple_items": False, "returns_named_value": False},
            allow_inspection=False,
            search_paths=[folder],
        )
        loaded = loader.load("fitact")
    assert isinstance(loaded, griffe.Object)
    return loaded


# What is to be said of an activation beside its fits.
NOTES = {
    "relu2": "`relu2_output` saves the output alone, which a trained layer that follows saves too: 2 bytes an "
    "element in bfloat16. A mask and the packed nonzero outputs would take 1/8 + 2·*d* bytes, where *d* is the "
    "share of nonzeros: 1.125 at one half, less than the output's 2 below *d* = 94 %. "
    "That needs sizes that depend on the data, and fitact does not do it.",
    "snake": "No step function ships: its derivative is a sine that never ends, and 8 levels on [−10, 10] are off "
    "by 0.53 (rms).",
}


def gallery(fits: Sequence[AnyFit]) -> str:
    """Return the page of shipped fits: for each activation, its fits, their errors and pictures."""
    parts = [
        "# Gallery",
        "Every shipped fit: what it saves for backward, the error of its approximation of `f′`, and a picture. "
        "`fitact show generated/fits/NAME.json` prints the same numbers, `fitact plot generated/fits/NAME.json` "
        "draws the picture, and the module is `fitact.generated.NAME`.",
        "*rms* and *largest* are errors of `f′` over the fit's domain. For a fit that saves the output, *largest* "
        "is over all numbers of bfloat16 or float32, with the output rounded once to that dtype; *floor* is the "
        "least that any function of that output and code could reach. Gates and formulas with learned parameters "
        "save their inputs, and are exact.",
    ]
    named: dict[str, list[AnyFit]] = {}
    for fit in fits:
        named.setdefault(fit.activation.name or fit.activation.expression, []).append(fit)
    parts.append(" · ".join(f"[{name}](#{name})" for name in named))
    for name, own in named.items():
        entry = CATALOG.get(name)
        formula = own[0].activation.expression if entry is None else entry.filled(entry.expression, {})
        gates = [fit for fit in own if isinstance(fit, GateFit)]
        parts += [f"## {name}", f"`{'h(g, u)' if gates else 'f(x)'} = {formula}`"]
        for kind, table in ((StepFit, _steps), (InvertedFit, _inverted), (OutputFit, _exact)):
            if chosen := [fit for fit in own if isinstance(fit, kind)]:
                parts.append(table(chosen))
        if name in NOTES:
            parts.append(NOTES[name])
        if gates:
            parts.append(_table([("", "saves"), *((f"`{fit.name}`", "`g` and `u`") for fit in gates)]))
        if formulas := [fit for fit in own if isinstance(fit, LearnedFit)]:
            rows = ((f"`{fit.name}`", "`x`", f"`{starts(fit.activation)}`") for fit in formulas)
            parts.append(_table([("", "saves", "learned, from"), *rows]))
        parts.append(
            "\n".join(
                f"![{fit.name}: f′, its approximation, and the error](gallery/{fit.name}.png)" for fit in own
            )
        )
    return _page(parts)


def _steps(fits: Sequence[StepFit]) -> str:
    rows = [("", "bits", "∫(f′ − q)²", "rms", "largest", "of `f`, largest")]
    for fit in fits:
        error = fit.error
        numbers = (_integral(fit), *(f"{error[key]:.4g}" for key in ("rms", "max", "primitive_max")))
        rows.append((f"`{fit.name}`", str(fit.bits), *numbers))
    return _table(rows)


def _integral(fit: StepFit) -> str:
    return f"{fit.error['rms'] ** 2 * fit.mass:.6g}"


def _inverted(fits: Sequence[InvertedFit]) -> str:
    rows = [("", "bits beside the output", "largest, bfloat16", "floor", "largest, float32")]
    for fit in fits:
        error, floor = fit.error, fit.floor
        numbers = (f"{error['bfloat16']:.4g}", f"{floor['bfloat16']:.4g}", f"{error['float32']:.3g}")
        rows.append((f"`{fit.name}`", str(fit.bits), *numbers))
    return _table(rows)


def _exact(fits: Sequence[OutputFit]) -> str:
    rows = [("", "`f′` as a function of the output `y`", "largest, bfloat16", "largest, float32")]
    for fit in fits:
        errors = (f"{fit.error[dtype]:.3g}" for dtype in ("bfloat16", "float32"))
        rows.append((f"`{fit.name}`", f"`{fit.derivative}`", *errors))
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    align = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], align, *rows[1:]))


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def shipped() -> list[AnyFit]:
    """Return the shipped fits, by activation and method."""
    fits = [read(path) for path in (ROOT / "generated" / "fits").glob("*.json")]
    return sorted(fits, key=lambda fit: (fit.activation.name or "", METHODS.index(fit.method), fit.name))


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    return {
        DOCS / "commands.md": commands(),
        DOCS / "api.md": api(),
        DOCS / "gallery.md": gallery(shipped()),
        **with_results(),
    }


def with_results() -> dict[Path, str]:
    """Return the pages that have tables of measurements between their marks."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.tables import filled

    pages = {path: path.read_text("utf-8") for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
    return {path: filled(text) for path, text in pages.items() if "<!-- end -->" in text}


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page differs")
    parser.add_argument("--pictures", action="store_true", help="draw all pictures again")
    arguments = parser.parse_args()
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text}
    if arguments.check:
        if stale:
            sys.exit(f"{', '.join(path.name for path in stale)}: not up to date; run python docs/build.py")
        return
    for path, text in stale.items():
        path.write_text(text, "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    GALLERY.mkdir(exist_ok=True)
    for fit in shipped():
        path = GALLERY / f"{fit.name}.png"
        if arguments.pictures or not path.exists():
            path.write_bytes(draw([fit], dpi=DPI))
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
