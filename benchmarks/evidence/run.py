"""Fine-tune a real pre-trained model, with exact gradients and with less saved; see how far each gradient is off.

    python -m benchmarks.evidence [--seeds N] [--steps N] [-o RESULTS.json]

from the root of the repository, or `make evidence`; half an hour on one core. It downloads two wheels from PyPI,
once (antibodies says which): AntiBERTy, a BERT for antibodies, and genes of T-cell receptors. The model
learns to fill in masked residues of these genes, with all weights trained or with LoRA of rank 8. Families of
genes are held out. Every finished run is written at once: the same command goes on after an interrupt, and more
seeds are added to those that are there.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fitact
from fitact.base import FitactError, JobError, write
from fitact.runtime.measure import count_saved

from ..convergence.run import read
from ..convergence.statistics import LEVEL, POWER
from ..convergence.summary import Comparison, as_record, compare_pairs
from ..convergence.training import DECAY, WARM_UP, Run
from .antibodies import (
    ANARCI,
    ANTIBERTY,
    IGNORED,
    Batch,
    Genes,
    add_adapters,
    evenly,
    fetch,
    masked,
    pretrained,
    receptors,
    split,
)
from .gradients import BASELINE, EXACT, Options, draw, errors, logits_of, loss_of, pre_activations

RESULTS = Path(__file__).parents[1] / "results" / "evidence.json"
PACKAGES = ("fitact", "peft", "scipy", "torch", "transformers")
MASKED_FROM = 1  # seed of what is masked of held-out sequences
METHODS: dict[str, tuple[str, Options]] = {
    BASELINE: ("baseline", None),
    EXACT: ("exact", {"error": "exact"}),
    "rounding": ("rounding", {"error": "rounding"}),
    "bits8": ("8 bits, attention too", {"error": "rounding", "bits": 8}),
    "coarse": ("coarse", {"error": "coarse"}),
    "fewbit3": ("Few-Bit, 3 bits", {"method": "fewbit", "bits": 3}),
    "inverted1": ("inverted, 1 bit", {"method": "inverted", "bits": 1}),
}
LABELS = {method: label for method, (label, _) in METHODS.items()}
TESTED = [method for method in METHODS if method not in (BASELINE, EXACT)]
REGIMES = {"lora": "LoRA", "full": "all weights"}
Job = tuple[str, str, int]


@dataclass(frozen=True)
class Setting:
    """How long is trained on what.

    Attributes:
        steps: of training.
        batch: sequences a step.
        share: of residues that are masked, in training and held out.
        rates: the highest learning rate of each regime.
        rank: of the adapters.
        validation: held-out sequences.
        gradient_batch: held-out sequences that gradients are taken of.

    """

    steps: int = 60
    batch: int = 1
    share: float = 0.3
    rates: tuple[tuple[str, float], ...] = (("lora", 2e-3), ("full", 1e-4))
    rank: int = 8
    validation: int = 32
    gradient_batch: int = 8


def jobs_of(seeds: int) -> list[Job]:
    """Return what is run, seed by seed; `exact` with the first seed alone, whose every loss must agree."""
    return [
        (regime, method, seed)
        for seed in range(seeds)
        for regime in REGIMES
        for method in METHODS
        if method != EXACT or seed == 0
    ]


def held_out(genes: Genes, setting: Setting, count: int) -> Batch:
    """Return a batch of held-out sequences, the same in every run."""
    generator = torch.Generator().manual_seed(MASKED_FROM)
    return masked(evenly(genes.held_out, count), setting.share, generator)


def train(start: nn.Module, genes: Genes, job: Job, setting: Setting) -> Run:
    """Fine-tune a copy of the model. The order of sequences, masks and adapters depend on the seed alone."""
    regime, method, seed = job
    model = copy.deepcopy(start)
    if regime == "lora":
        model = add_adapters(model, setting.rank, seed)
    options = METHODS[method][1]
    if options is not None:
        fitact.convert(model, **options)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = dict(setting.rates)[regime]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, setting.steps, pct_start=WARM_UP)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    saved_bytes = 0
    begin = time.perf_counter()
    for _ in range(setting.steps):
        chosen = torch.randint(len(genes.training), (setting.batch,), generator=generator).tolist()
        batch = masked([genes.training[i] for i in chosen], setting.share, generator)
        if losses:
            loss = loss_of(model, batch)
        else:
            with count_saved(model) as saved:
                loss = loss_of(model, batch)
            saved_bytes = saved.bytes
            saved.release()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    loss_after, accuracy = evaluate(model, held_out(genes, setting, setting.validation))
    diverged = next((i for i, each in enumerate([*losses, loss_after]) if not math.isfinite(each)), None)
    return Run(
        regime,
        method,
        seed,
        [each if math.isfinite(each) else None for each in losses],
        loss_after if diverged is None else None,
        accuracy if diverged is None else None,
        diverged,
        saved_bytes,
        round(seconds, 2),
    )


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Return the mean cross entropy of masked residues in nats, and the share that is found."""
    logits, labels = logits_of(model, batch).flatten(0, 1), batch[2].flatten()
    right = (logits.argmax(-1) == labels).sum() / (labels != IGNORED).sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED).item(), right.item()


def agree(runs: Iterable[Run]) -> None:
    """Raise JobError unless `exact` runs have every loss of the baseline's runs, to the last bit."""
    by_seed = {(run.task, run.method, run.seed): run for run in runs}
    for (regime, method, seed), run in by_seed.items():
        baseline = by_seed.get((regime, BASELINE, seed))
        if method == EXACT and baseline and (run.curve, run.loss) != (baseline.curve, baseline.loss):
            raise JobError(
                f'{regime}, seed {seed}: expected the baseline\'s losses with error="exact", got others'
            )


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Return held-out losses compared with the baseline's runs; the tests of a regime are corrected together."""
    values = {(run.task, run.method, run.seed): run for run in runs}
    pairs = [(method, BASELINE) for method in TESTED]
    return [test for regime in REGIMES for test in compare_pairs(values, regime, "loss", "baseline", pairs)]


def circumstances(setting: Setting, genes: Genes) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "setting": asdict(setting),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "wheels": [asdict(wheel) for wheel in (ANTIBERTY, ANARCI)],
        "sequences": {"training": len(genes.training), "held_out": len(genes.held_out)},
    }


def document(now: dict[str, Any], measured: dict[str, Any], runs: Sequence[Run]) -> str:
    """Return the JSON text, an item a line."""
    methods = list(METHODS)
    runs = sorted(runs, key=lambda run: (run.seed, list(REGIMES).index(run.task), methods.index(run.method)))
    lists = {name: items for name, items in measured.items() if isinstance(items, list)}
    lists |= {
        "comparisons": [as_record(test) for test in compare(runs)],
        "runs": [asdict(run) for run in runs],
    }
    record = {
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores",
        "date": date.today().isoformat(),
        **now,
        **{name: item for name, item in measured.items() if name not in lists},
    }
    head = json.dumps(record, indent=1).removesuffix("\n}")
    for name, items in lists.items():
        head += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(item) for item in items) + "\n ]"
    return head + "\n}\n"


def measure(model: nn.Module, genes: Genes, setting: Setting) -> dict[str, Any]:
    """Return the held-out loss before training, and gradients of a batch of the model as it was trained."""
    loss, accuracy = evaluate(model, held_out(genes, setting, setting.validation))
    batch = held_out(genes, setting, setting.gradient_batch)
    options = {method: given for method, (_, given) in METHODS.items()}
    return {
        "before": {"loss": loss, "accuracy": accuracy},
        "pre_activations": pre_activations(model, batch),
        "gradients": list(errors(model, batch, options)),
    }


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return what docs/antibody.md shows of the results, as Markdown: differences, gradients by part."""
    saved = {(run["task"], run["method"]): run["saved_bytes"] for run in record["runs"] if run["seed"] == 0}
    rows = ["| trained | saved for backward | bytes | loss less the baseline's, nats | p, Holm | would be found |"]
    rows.append("|---|---|---:|---:|---:|---:|")
    for regime, title in REGIMES.items():
        compared = {test["method"]: test for test in record["comparisons"] if test["task"] == regime}
        for method in (method for method in METHODS if (regime, method) in saved):
            share = saved[regime, method] / saved[regime, BASELINE]
            start = f"| {title} | {LABELS[method]} | {100 * share:.1f} % |"
            rows.append(f"{start} {_compared(method, compared.get(method))} |")
    parts = {"differences": "\n".join(rows)}
    for part in ("intermediate", "output", "attention", "input"):
        of = {(row["method"], row["layer"]): row[part] for row in record["gradients"]}
        shown = [method for method in METHODS if method != EXACT and (method, 1) in of]
        lines = [f"| layer | {' | '.join(LABELS[method] for method in shown)} |", "|---:" * (len(shown) + 1) + "|"]
        lines += [
            f"| {layer} | {' | '.join(_short(of[method, layer]) for method in shown)} |"
            for layer in sorted({layer for _, layer in of})
        ]
        parts[part] = "\n".join(lines)
    return parts


def _compared(method: str, test: dict[str, Any] | None) -> str:
    if method == BASELINE:
        return "| |"
    if method == EXACT:
        return "0, every loss the same | |"
    if test is None or test["difference"] is None:
        return f"{'too few seeds' if test is None else 'diverged'} | |"
    sign = "+" if test["difference"] > 0 else ""
    mark = " *" if test["distinguishable"] else ""
    return (
        f"{sign}{_two(test['difference'])} ± {_two(test['half'])} | {test['adjusted']:.2g}{mark}"
        f" | {_two(test['detectable'])}"
    )


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 1e-5 else f"{_two(100 * value)} %"


def _two(value: float) -> str:
    """Return a number with two digits, but no more than six decimals, and with the sign of a minus."""
    decimals = min(6, max(0, 1 - math.floor(math.log10(abs(value))))) if value else 1
    return f"{value:.{decimals}f}".replace("-", "−")


def sentences(record: dict[str, Any]) -> list[str]:
    """Return what the runs say, for docs/antibody.md."""
    before = record["before"]
    said = [
        f"Before any training the held-out loss is {before['loss']:.3f} nats, and {100 * before['accuracy']:.1f} %"
        " of masked residues are found."
    ]
    for regime, title in REGIMES.items():
        baseline = [run for run in record["runs"] if (run["task"], run["method"]) == (regime, BASELINE)]
        if not baseline or any(run["loss"] is None for run in baseline):
            continue
        losses, shares = ([run[key] for run in baseline] for key in ("loss", "accuracy"))
        said.append(
            f"Baseline training of {title} ends at {min(losses):.3f} to {max(losses):.3f} nats "
            f"over {len(baseline)} seeds, with {100 * min(shares):.1f} to {100 * max(shares):.1f} % found."
        )
    tested = [test for test in record["comparisons"] if test["difference"] is not None]
    for regime, title in REGIMES.items():
        different = [
            LABELS[test["method"]] for test in tested if test["task"] == regime and test["distinguishable"]
        ]
        of = [test for test in tested if test["task"] == regime]
        if each := [test["detectable"] for test in of]:
            verdict = (
                f"distinguishable from the baseline: {', '.join(different)}"
                if different
                else "no method can be distinguished from the baseline"
            )
            said.append(
                f"With {title} trained, {_seeds(of)}, {verdict} (tests at {100 * LEVEL:.0f} %, Holm); a true"
                f" difference of {_two(min(each))} to {_two(max(each))} nats, depending on the method, would have"
                f" been found with probability {POWER}."
            )
    return said


def _seeds(of: list[dict[str, Any]]) -> str:
    pairs = sorted({test["pairs"] for test in of})
    return f"over {' to '.join(dict.fromkeys(map(str, (pairs[0], pairs[-1]))))} seeds"


def work(
    path: Path, setting: Setting, seeds: int, start: Callable[[], nn.Module], genes: Genes, *, picture: bool = True
) -> Generator[Run, None, None]:
    """Do what is not done yet, write each run as it is finished, and yield it; in the end, draw."""
    now = circumstances(setting, genes)
    runs = read(path, now)
    model = start()
    names = ("before", "pre_activations", "gradients")
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        measured = {name: record[name] for name in names}
    else:
        measured = measure(model, genes, setting)
        write(path, document(now, measured, []))
    if picture:
        draw(measured["gradients"], LABELS, path.with_name(f"{path.stem}_gradients.png"))
    there = {(run.task, run.method, run.seed) for run in runs}
    for job in (job for job in jobs_of(seeds) if job not in there):
        runs.append(train(model, genes, job, setting))
        agree(runs)
        write(path, document(now, measured, runs))
        yield runs[-1]


def main() -> None:
    """Do what is not done yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5, help="from 0 on")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="of training")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        genes, weights = split(receptors(fetch(ANARCI))), fetch(ANTIBERTY)
        print(f"{len(genes.training)} sequences to train on, {len(genes.held_out)} held out", flush=True)
        for run in work(
            arguments.output, Setting(arguments.steps), arguments.seeds, lambda: pretrained(weights), genes
        ):
            print(f"{run.task} {run.method} {run.seed}: {run.loss} nats, {run.seconds} s", flush=True)
    except KeyboardInterrupt:
        sys.exit("interrupted: what is finished is kept, the same command goes on")
    except FitactError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    record = json.loads(arguments.output.read_text(encoding="utf-8"))
    print("\n\n".join([*tables(record).values(), *sentences(record)]))


if __name__ == "__main__":
    main()
