"""benchmarks/evidence: that a run goes on, and the numbers of docs/antibody.md."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.convergence import run
from benchmarks.evidence import antibodies, gradients
from benchmarks.evidence import run as evidence
from benchmarks.evidence.antibodies import VOCABULARY, Genes
from benchmarks.evidence.run import METHODS, REGIMES, Setting
from fitact.base import UsageError
from tests.conftest import ROOT

TINY = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 24, "max_position_embeddings": 16}
SETTING = Setting(steps=2, rank=2, validation=3, gradient_batch=2)
DRAW = random.Random(0)
SEQUENCES = ["".join(DRAW.choices("ACDEFGHIKLMNPQRSTVWY", k=DRAW.randint(6, 10))) for _ in range(12)]
GENES = Genes(SEQUENCES[:8], SEQUENCES[8:])


def test_runs_go_on(tmp_path: Path) -> None:
    """What an interrupt leaves is neither lost nor done again, and each run is that of one go."""
    torch.manual_seed(0)
    model = antibodies.bert({**TINY, "initializer_range": 0.5}).eval()  # its activations are far from linear
    path = tmp_path / "a.json"
    interrupted = evidence.work(path, SETTING, 1, lambda: model, GENES, picture=False)
    first = [next(interrupted) for _ in range(3)]
    interrupted.close()
    rest = list(evidence.work(path, SETTING, 1, lambda: model, GENES))
    runs = run.read(path, evidence.circumstances(SETTING, GENES))
    jobs = [(each.task, each.method, each.seed) for each in [*first, *rest]]
    assert jobs == evidence.jobs_of(1) == [(regime, method, 0) for regime in REGIMES for method in METHODS]
    assert sorted(map(repr, runs)) == sorted(map(repr, [*first, *rest]))
    there = {(run.task, run.method): dataclasses.replace(run, seconds=0.0) for run in runs}
    again = evidence.train(model, GENES, ("full", "fewbit3", 0), SETTING)
    assert dataclasses.replace(again, seconds=0.0) == there["full", "fewbit3"]
    losses = {job: run.curve for job, run in there.items()}
    assert losses["lora", "baseline"][0] == losses["full", "baseline"][0]  # adapters begin with nothing
    assert losses["full", "baseline"] == losses["full", "exact"] != losses["full", "fewbit3"]
    saved = {method: next(run.saved_bytes for run in runs if run.method == method) for method in METHODS}
    assert saved["exact"] < saved["baseline"]
    written = json.loads(path.read_text(encoding="utf-8"))["gradients"]
    off = {(row["method"], row["layer"]): row["output"] for row in written}
    assert off["baseline", 1] < 1e-5 < off["inverted1", 1] < off["fewbit3", 1]
    assert path.with_name("a_gradients.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="made with other setting: remove it"):
        run.read(path, evidence.circumstances(dataclasses.replace(SETTING, steps=3), GENES))


RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/evidence.json").read_text(encoding="utf-8"))


def test_the_page_says_what_the_record_says() -> None:
    words = " ".join((ROOT / "docs" / "antibody.md").read_text(encoding="utf-8").split())
    setting, sequences, versions = RECORD["setting"], RECORD["sequences"], RECORD["versions"]
    for part in (
        *evidence.sentences(RECORD),
        f"{setting['steps']} steps of {setting['batch']} sequence",
        f"{100 * setting['share']:.0f} % of its residues",
        f"{sequences['training']} sequences to train on, {sequences['held_out']} held out",
        f"PyTorch {versions['torch'].partition('+')[0]}",
        *(f"{name} {versions[name]}" for name in ("transformers", "peft")),
        RECORD["date"],
    ):
        assert part in words, part


def test_exact_changes_no_bit_and_calibrated_fits_are_nearer() -> None:
    rows = json.loads((ROOT / "benchmarks/results/calibration.json").read_text(encoding="utf-8"))["rows"]
    assert all(row["calibrated"] < row["shipped"] for row in rows)
    runs = {(each["task"], each["method"], each["seed"]): each for each in RECORD["runs"]}
    for regime in REGIMES:
        baseline, exact = (runs[regime, method, 0] for method in ("baseline", "exact"))
        assert (exact["curve"], exact["loss"]) == (baseline["curve"], baseline["loss"])
        assert len(baseline["curve"]) == RECORD["setting"]["steps"]
    bits = [row["bits"] for row in RECORD["gradients"] if row["method"] == "exact"]
    assert all(bits) and len(bits) == 8


def test_what_the_page_tells() -> None:
    """The ranges of its last list."""
    errors: dict[str, list[float]] = {}
    for row in RECORD["gradients"]:
        errors.setdefault(row["method"], []).extend(row[part] for part in gradients.PARTS)
    layers = {(row["method"], row["layer"]): row for row in RECORD["gradients"]}
    inexact = errors.keys() - {"baseline", "exact"}
    growth = [layers[method, 1][part] / layers[method, 8][part] for method in inexact for part in gradients.PARTS]
    assert round(max(growth), 1) == 2.5
    for method, digits, *ends in (
        ("rounding", 1, 0.6, 1.3),
        ("bits8", 1, 0.7, 2.0),
        ("coarse", 0, 10, 19),
        ("fewbit3", 0, 12, 20),
        ("inverted1", 2, 0.01, 0.02),
    ):
        assert [round(100 * each(errors[method]), digits) for each in (min, max)] == ends
    deviations = [row["deviation"] for row in RECORD["pre_activations"]]
    assert [round(x, 1) for x in (min(deviations), max(deviations))] == [1.1, 1.4]
    gains = [RECORD["before"]["loss"] - each["loss"] for each in RECORD["runs"] if each["method"] == "baseline"]
    assert [round(x, 1) for x in (min(gains), max(gains))] == [0.7, 0.7]
    first = [each for each in RECORD["runs"] if each["seed"] == 0]
    saved = {(each["task"], each["method"]): each["saved_bytes"] for each in first}
    for regime in REGIMES:
        for method, share in (("exact", 5 / 8), ("rounding", 1 / 3), ("bits8", 1 / 6), ("coarse", 1 / 8)):
            assert abs(saved[regime, method] / saved[regime, "baseline"] - share) < 0.025
