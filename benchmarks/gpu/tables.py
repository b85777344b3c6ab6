"""The results as tables, for the places of docs/gpu.md and README that are marked for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
MARKED = re.compile(r"(<!-- gpu: (\w+) -->).*?(<!-- end -->)", re.DOTALL)
NOTHING = "**Nothing has been measured on a GPU yet.** `make gpu` does it on a machine that has one"
SUMMARY = "LLaMA-7B"  # the model on README's first screen
SUMMARISED = ("baseline", "exact", "rounding", "coarse", "checkpointing", "selective checkpointing")
ANOTHER = ", in another run"  # of variants that another machine measured, perhaps with a baseline of its own
Row = dict[str, Any]
Part = dict[str, Any]  # what a JSON has


def results(folder: Path = RESULTS) -> dict[str, Part]:
    """Return the results by part, of those parts that have been measured."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def filled(text: str, parts: dict[str, Part]) -> str:
    """Return a page with the results between its marks, `<!-- gpu: PART -->` and `<!-- end -->`."""

    def content(match: re.Match[str]) -> str:
        lines = summary(parts) if match[2] == "summary" else blocks(match[2], parts)
        return "\n\n".join([match[1], *lines, match[3]])

    return MARKED.sub(content, text)


def summary(parts: dict[str, Part]) -> list[str]:
    """Return the steps of one model; that there is nothing, if so."""
    if "steps" not in parts:
        return [f"{NOTHING} ([On a GPU](docs/gpu.md))."]
    steps = parts["steps"]
    rows = [row for row in steps["rows"] if row.get("model") == SUMMARY and row["variant"] in SUMMARISED]
    where = f"{steps['device']['name']}, PyTorch {steps['versions']['torch']}, {steps['date'][:10]}"
    title = f"Training steps of two blocks of {SUMMARY} with the loss ([more](docs/gpu.md); {where}):"
    return [title, *of_steps(rows, host=False)]


def blocks(name: str, parts: dict[str, Part]) -> list[str]:
    """Return a part's tables, with where they were measured and what could not be."""
    if name not in parts:
        return [f"{NOTHING}."]
    rows = parts[name]["rows"]
    return [f"Measured on {measured_on(parts[name])}", *TABLES[name](rows), *failures(rows)]


def measured_on(part: Part) -> str:
    """Return where and when a part was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items() if version)
    device = f"{part['device']['name']}{', a rehearsal with tiny sizes' if part['tiny'] else ''}"
    return f"{device}, {part['date']}, commit {(part['commit'] or 'unknown')[:9]}, {versions}."


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what could not be measured, and why."""
    lines = [f"- {label(row)}: `{' '.join(str(row['error']).split())[:200]}`" for row in rows if "error" in row]
    skipped = sum("skipped" in row and "tests" not in row for row in rows)
    text = ["Failed:", "\n".join(lines)] if lines else []
    return text + ([f"No time was left for {skipped} rows."] if skipped else [])


def label(row: Row) -> str:
    """Return a row's name: its texts."""
    return ", ".join(str(value) for name, value in row.items() if isinstance(value, str) and name != "error")


# ---------------------------------------------------------------------------------------------------------- tables


def of_correctness(rows: Sequence[Row]) -> list[str]:
    """Return how the tests ended, and the table of gradients."""
    tests = [
        f"Tests: {', '.join(f'{row.get(outcome, 0)} {outcome}' for outcome in ('passed', 'failed', 'skipped'))}."
        for row in rows
        if "tests" in row
    ]
    columns = list(dict.fromkeys((row["model"], row["precision"]) for row in rows if "equal" in row))
    cells = []
    for variant, own in grouped(rows, "variant", "equal").items():
        by_model = {(row["model"], row["precision"]): row for row in own}
        cells.append([variant, *(agreement(by_model[each]) if each in by_model else "—" for each in columns)])
    return [*tests, table(["", *(", ".join(each) for each in columns)], cells)]


def agreement(row: Row) -> str:
    """Return that all gradients are equal, or how far the whole is off."""
    return "equal" if row["equal"] == row["of"] else percent(row["gradient_off"])


def of_steps(rows: Sequence[Row], *, host: bool = True) -> list[str]:
    """Return a table for each model; `host` is whether it has the host's time and that of a CUDA graph."""
    tables = []
    for model, own in grouped(rows, "model", "ms").items():
        first = own[0]  # the baseline
        another = next((row for row in own if row["variant"] == f"baseline{ANOTHER}"), first)
        cells = [
            (
                row["variant"],
                f"{row['ms']:.2f}",
                *((number(row, "host_ms", ".2f"), number(row, "graphed_ms", ".2f")) if host else ()),
                f"{row['ms'] / (another if row['variant'].endswith(ANOTHER) else first)['ms']:.2f}",
                f"{row['saved_mib']:,.1f}",
                number(row, "peak_mib", ",.1f"),
                f"{row['peak_mib'] / first['peak_mib']:.2f}" if "peak_mib" in row else "—",
            )
            for row in own
        ]
        header = [
            model,
            "ms",
            *(("host, ms", "graph, ms") if host else ()),
            "of baseline",
            "saved, MiB",
            "peak, MiB",
            "of baseline",
        ]
        tables.append(table(header, cells))
    return tables


def of_kernels(rows: Sequence[Row]) -> list[str]:
    """Return a table for each function."""
    tables = []
    for function, own in grouped(rows, "function", "forward_ms").items():
        eager = {row["dtype"]: row for row in own if row["variant"] == "eager"}
        cells = []
        for row in own:
            base = eager.get(row["dtype"])
            ratio = f"{both(row) / both(base):.2f}" if base else ""
            shares = [f"{100 * row[name]:.0f} %" for name in ("forward_share", "backward_share")]
            cells.append([row["variant"], row["dtype"], ratio, *shares, f"{row['saved_bytes']:.4g}"])
        tables.append(table([function, "", "time", "forward, of a copy", "backward, of a copy", "saved"], cells))
    return tables


def both(row: Row) -> float:
    """Return the time of both passes."""
    return float(row["forward_ms"] + row["backward_ms"])


def of_batch(rows: Sequence[Row]) -> list[str]:
    """Return the table of plans, and that of the largest inputs."""
    plans = [
        (
            row["plan"],
            f"{row['promised_gib']:.2f}",
            number(row, "peak_gib", ".2f"),
            f"{row['promised_ms']:.0f}",
            f"{row['ms']:.0f}",
        )
        for row in rows
        if "ms" in row
    ]
    largest = [
        [row["model"], row["variant"], f"{row['largest']} {row['size']:,}"] for row in rows if "size" in row
    ]
    header = ["plan", "promised, GiB", "peak, GiB", "promised, ms", "ms"]
    return [table(header, plans), table(["", "", "largest"], largest)]


def of_training(rows: Sequence[Row]) -> list[str]:
    """Return the table of all models."""
    cells = []
    for model, own in grouped(rows, "model", "tokens_per_s").items():
        cells += [
            (
                model,
                row["variant"],
                f"{row['tokens_per_s']:,.0f}",
                number(row, "peak_mib", ",.1f"),
                f"{row['first_loss']:.4f}",
                f"{row['last_loss']:.4f}",
            )
            for row in own
        ]
    return [table(["", "", "tokens a second", "peak, MiB", "first loss", "last loss"], cells)]


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "correctness": of_correctness,
    "steps": of_steps,
    "kernels": of_kernels,
    "batch": of_batch,
    "training": of_training,
}


def grouped(rows: Sequence[Row], name: str, measured: str) -> dict[str, list[Row]]:
    """Return the rows that were measured, by the value of a column."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if measured in row:
            groups.setdefault(row[name], []).append(row)
    return groups


def number(row: Row, name: str, form: str) -> str:
    """Return a number, which only a GPU gives."""
    return format(row[name], form) if name in row else "—"


def percent(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.2g} %"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    align = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, align, *rows))
