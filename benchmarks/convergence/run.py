"""Train every task with every method from every seed, in parallel; write numbers, pictures and sentences.

    python -m benchmarks.convergence [--large | --stored | --learned] [--task NAME ...] [--method NAME ...]
                                     [--seeds N] [-o F]

from the root of the repository. Less than an hour on two cores; `--large` wants a GPU; `--stored`, some hours,
quantises all that is saved, in block codes and in what others use; `--learned`, less than half an hour, trains
activations with learned parameters, converted and not. Every finished run is written: the same command goes
on after an interrupt, and more seeds are added to those that are there.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from fitact.base import FitactError, UsageError, write

from . import plot
from .methods import METHODS, methods_of
from .summary import LEAST, as_record, compare, sentences, table
from .tasks import LARGE, LEARNED, SMALL, STORED, TASKS, Setting, code, prose
from .training import Run, train

ROOT = Path(__file__).parents[2]
PACKAGES = ("fitact", "numpy", "peft", "scikit-learn", "scipy", "torch")
ASKED = (LARGE, STORED, LEARNED)  # by options of their names
Job = tuple[str, str, int]


def circumstances(setting: Setting) -> dict[str, Any]:
    """Return what the numbers depend on."""
    texts = {"code": code(), "prose": prose()}
    packages = (*PACKAGES, "transformers") if "xielu" in setting.recipes else PACKAGES
    return {
        "setting": asdict(setting),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "texts": {
            name: {"characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in texts.items()
        },
    }


def read(path: Path, now: dict[str, Any]) -> list[Run]:
    """Return the runs of an earlier call, none if there is no file.

    Raises:
        UsageError: they were made under other circumstances, or the file is not what `document` writes.

    """
    if not path.exists():
        return []
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        runs = [Run(**run) for run in written["runs"]]
        then = {key: written[key] for key in now}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: expected results of this benchmark, got {error!r}: remove it") from None
    other = [key for key in now if then[key] != json.loads(json.dumps(now[key]))]
    if other:
        raise UsageError(f"{path}: made with other {' and '.join(other)}: remove it, or name another file with -o")
    return runs


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Return runs by task, seed and method, however they came to be finished."""
    tasks, methods = list(TASKS), list(METHODS)
    return sorted(runs, key=lambda run: (tasks.index(run.task), run.seed, methods.index(run.method)))


def document(now: dict[str, Any], runs: Sequence[Run]) -> str:
    """Return the JSON text, a run a line."""
    comparisons = compare(runs)
    record = {
        "machine": torch.cuda.get_device_name()
        if now["setting"]["device"] == "cuda"
        else f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores",
        "date": date.today().isoformat(),
        **now,
        "sentences": sentences(comparisons),
    }
    head = json.dumps(record, indent=1, ensure_ascii=False).removesuffix("\n}")
    lists = {"comparisons": map(as_record, comparisons), "runs": map(asdict, runs)}
    for name, items in lists.items():
        head += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(item) for item in items) + "\n ]"
    return head + "\n}\n"


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    torch.set_num_threads(1)


def _run(job: Job, setting: Setting, store: Path) -> Run:
    task, method, seed = job
    return train(TASKS[task], METHODS[method], setting, seed, store)


def run_all(jobs: Sequence[Job], setting: Setting, store: Path, workers: int) -> Iterator[Run]:
    """Yield runs as they finish, in processes of their own on one thread each."""
    if not jobs:
        return
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs)), _start) as pool:
        yield from pool.imap_unordered(partial(_run, setting=setting, store=store), jobs)


def finish(path: Path, now: dict[str, Any], runs: Sequence[Run]) -> None:
    """Write numbers and pictures; print the table and the sentences."""
    comparisons = compare(runs)
    write(path, document(now, runs))
    steps = {task: recipe["steps"] for task, recipe in now["setting"]["recipes"].items()}
    pictures = plot.draw(runs, comparisons, steps, path)
    saved = {(run.task, run.method): run.saved_bytes for run in runs}
    if comparisons:
        print("\n\n".join([table(comparisons, saved), *sentences(comparisons)]), end="\n\n")
    print(f"wrote {', '.join(os.path.relpath(file) for file in [path, *pictures])}")


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option("--large", is_flag=True, help="Larger models, on a GPU, under autocast to bfloat16.")
@click.option("--stored", is_flag=True, help="All that is saved quantised, in block codes and in other ways.")
@click.option("--learned", is_flag=True, help="Activations with learned parameters, converted and not.")
@click.option("--task", "tasks", type=click.Choice(list(TASKS)), multiple=True, help="By default all.")
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, help="By default all.")
@click.option("--seeds", type=click.IntRange(min=LEAST), default=5, show_default=True, help="From 0 on.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; by default 2, with --large 1.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The results, JSON.")
def main(
    large: bool,
    stored: bool,
    learned: bool,
    tasks: tuple[str, ...],
    methods: tuple[str, ...],
    seeds: int,
    workers: int | None,
    output: Path | None,
) -> None:
    """Do what is not done yet."""
    chosen = [setting for setting, wanted in zip(ASKED, (large, stored, learned), strict=True) if wanted]
    if len(chosen) > 1:
        names = " and ".join(f"--{setting.name}" for setting in chosen)
        raise click.UsageError(f"expected one setting, got {names}: leave one out")
    setting = chosen[0] if chosen else SMALL
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--large expects a GPU that PyTorch can use, and there is none: leave it out")
    name = "convergence.json" if setting is SMALL else f"convergence_{setting.name}.json"
    path = output or ROOT / "benchmarks" / "results" / name
    now = circumstances(setting)
    print(f"{setting.name} setting on {setting.device}; texts of {len(code()):,} and {len(prose()):,} characters")
    try:
        _work(path, now, setting, tasks or tuple(setting.recipes), methods or tuple(METHODS), seeds, workers)
    except FitactError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def _work(
    path: Path,
    now: dict[str, Any],
    setting: Setting,
    tasks: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    workers: int | None,
) -> None:
    runs = {(run.task, run.method, run.seed): run for run in read(path, now)}
    wanted = [
        (task, method, seed)
        for seed in range(seeds)
        for task in setting.recipes
        for method in methods_of(setting.name)
        if task in tasks and method in methods
    ]
    jobs = [job for job in wanted if job not in runs]
    print(f"{len(wanted)} runs; {len(wanted) - len(jobs)} are there")
    # what tasks begin with depends on the same circumstances as the results
    digest = hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:12]
    store = ROOT / "build" / "convergence" / f"{setting.name}-{digest}"

    try:
        with click.progressbar(length=len(jobs), label="training", file=sys.stderr, show_pos=True) as progress:
            for run in run_all(jobs, setting, store, workers or (1 if setting.device == "cuda" else 2)):
                runs[run.task, run.method, run.seed] = run
                write(path, document(now, in_order(runs.values())))
                progress.update(1)
    except KeyboardInterrupt:
        print("\ninterrupted: what is finished is kept, the same command goes on", file=sys.stderr)
    if runs:
        finish(path, now, in_order(runs.values()))


if __name__ == "__main__":
    main()
