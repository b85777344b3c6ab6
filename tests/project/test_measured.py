"""Tables of the documents are those of the committed measurements, which are made again in small."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import layers
from benchmarks.convergence.tasks import SMALL
from benchmarks.evidence import blocks, checkpoints, convolutions
from fitact.runtime.choose import POLICIES, changed
from fitact.runtime.measure import hugging_face, prepare, whole_step
from fitact.runtime.saving import nbytes
from tests.conftest import ROOT

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("saving", "storage")}
RECORDS: dict[str, Any] = {
    module.__name__.rpartition(".")[2]: json.loads(module.RESULTS.read_text("utf-8"))
    for module in (blocks, checkpoints, convolutions, layers)
}
RECIPE = replace(SMALL.recipes["characters"], steps=60, rate=blocks.RATE, validation=8)


def errors(name: str) -> list[dict[str, float]]:
    return [row["error"] for row in RECORDS[name]["rows"]]


def ratios(name: str, of: str) -> tuple[int, int]:
    actual = [error[of] / error["8 bits"] for error in errors(name)]
    return round(min(actual)), round(max(actual))


def test_what_is_said_of_block_codes() -> None:
    for variant, said in {"encode": "coding takes 3.2 to 4.3 ns", "decode": "decoding 1.6 to 2.8,"}.items():
        actual = [row["nanoseconds"][variant] for row in RECORDS["blocks"]["times"]]
        assert f"{min(actual):.1f} to {max(actual):.1f}" in said and said in PAGES["storage"]
    times = [[row[variant] for row in RECORDS["blocks"]["times"]] for variant in ("encode", "decode")]
    said = " times and ".join(f"{min(time):.0f} to {max(time):.0f}" for time in times)
    assert f"{said} times as long as PyTorch's GELU" in PAGES["storage"].replace("\n", " ")
    for dtype, limit in (("float32", 0.01), ("bfloat16", 0.013)):
        assert max(row["error"]["rounding"] for row in RECORDS["blocks"]["rows"] if row["dtype"] == dtype) < limit
    coarse = [error["coarse"] for error in errors("blocks")]
    assert (round(min(coarse), 2), round(max(coarse), 2)) == (0.07, 0.13)
    assert ratios("blocks", "e4m3, 1×128") == (3, 5)
    for row in RECORDS["convolutions"]["rows"][:5]:  # with ReLU
        assert row["error"]["rounding, batch norms too"] < 0.01
        assert row["saved"]["rounding, batch norms too"] < row["saved"]["exact"] / 2
    assert all(error["rounding"] < 0.01 for error in errors("convolutions"))


def test_what_is_said_of_checkpoints() -> None:
    assert ratios("checkpoints", checkpoints.FLOAT8) == (3, 5)
    assert all(0.0025 < error["8 bits"] < 0.0135 for error in errors("checkpoints"))
    rows = RECORDS["checkpoints"]["rows"]
    first, last = ([row for row in rows if row["blocks"] == checkpoints.DEPTHS[end]] for end in (0, -1))
    for a, b in zip(first, last, strict=True):
        low, high = (1.05, 1.15) if a["dtype"] == "float32" else (1.2, 1.45)
        assert low < b["error"]["8 bits"] / a["error"]["8 bits"] < high
    assert [round(nbytes((2048, 4096), bits) / (2 * 2048 * 4096), 2) for bits in (8, 4)] == [0.52, 0.27]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "again", "factor"),
    [
        ("blocks", lambda: blocks.rows(RECIPE, ()), 2),
        pytest.param("checkpoints", lambda: checkpoints.rows(RECIPE, (4,)), 3, marks=pytest.mark.full),
    ],
)
def test_errors_again(name: str, again: Callable[[], list[dict[str, Any]]], factor: float) -> None:
    """A model that was trained for less time; errors are of the same order."""
    for row in again():
        same = {key: row[key] for key in ("model", "inputs", "dtype", "blocks") if key in row}
        (stated,) = (record["error"] for record in RECORDS[name]["rows"] if same.items() <= record.items())
        for policy, error in row["error"].items():
            assert stated[policy] / factor < error < factor * stated[policy], (row, policy)


ROWS: list[dict[str, Any]] = RECORDS["layers"]["rows"]


def test_nothing_that_computes_no_product_again_saves_less() -> None:
    pairs = [(row["layer"], row["training"]) for row in ROWS]
    assert pairs == [(name, training) for name in layers.LAYERS for training in layers.TRAININGS]
    assert "Everywhere *exact* saves least" in PAGES["saving"]
    for row in ROWS:
        saved = row["saved"]
        assert not row["again"]  # so says the text of the compiler's products
        assert saved["coarse"] < saved["rounding"] < saved["exact"]
        less = {variant for variant in saved if saved[variant] < saved["exact"]}
        assert {variant for variant in less if "attention recomputed" not in variant} == {"rounding", "coarse"}
        gained = [saved[variant] - saved[f"{variant}, attention recomputed"] for variant in ("exact", "coarse")]
        of_t5 = (row["layer"], row["training"]) == ("T5, gated", "everything")
        assert gained == pytest.approx([9.0, 8.25] if of_t5 else [1.0, 0.55], abs=0.05)


@pytest.mark.full
def test_the_meter_counts_what_a_gpu_measured() -> None:
    """Steps of two blocks of LLaMA-7B."""
    steps = json.loads((ROOT / "benchmarks/results/gpu/steps.json").read_text("utf-8"))["rows"]
    measured = {row["variant"]: row for row in steps if row["model"] == "LLaMA-7B"}
    subject = prepare(hugging_face("llama", {"num_hidden_layers": 2}), batch=8, seq=2048, dtype=torch.bfloat16)
    for name in ("baseline", "exact", "rounding", "coarse"):
        of_gpu = [measured[name][what] for what in ("saved_mib", "peak_mib")]
        with changed([subject.model], [POLICIES[name]]):
            step = whole_step(subject)
        assert [step.saved.bytes / 2**20, step.peak / 2**20] == pytest.approx(of_gpu, rel=1e-3)


@pytest.mark.parametrize("name", ["LLaMA-7B", pytest.param("BERT", marks=pytest.mark.full)])
def test_bytes_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer tokens: what is saved for one is nearly the same."""
    monkeypatch.setattr(layers, "BATCH", 2)
    monkeypatch.setattr(layers, "SEQ", 64)
    (row,) = (row["saved"] for row in ROWS if (row["layer"], row["training"]) == (name, "everything"))
    numbers = layers.tokens(name) * layers.LAYERS[name][2]["hidden_size"] * 2
    for variant in ("baseline", "exact", "rounding", "coarse", "coarse, attention recomputed"):
        each, two = (layers.bytes_saved(name, "everything", n, layers.WAYS[variant]) for n in (1, 2))
        assert (two - each) / numbers == pytest.approx(row[variant], rel=0.01)


def test_counts_of_others() -> None:
    """By hand, for LLaMA: 2 norms' inputs and outputs, q, k, v, o, and of the MLP g, u and their product."""
    wide = 688 / 256
    assert layers.counted("LLaMA-7B", "everything") == {"Liger": pytest.approx(2 + 2 + 4 + 3 * wide)}
    lora = {"unsloth": 2 + 2 + 4 + 2 * wide, "Liger": 2 + 2 + 4 + 3 * wide + 7 * 8 / 256}
    assert layers.counted("LLaMA-7B", "LoRA") == pytest.approx(lora)
    assert layers.counted("LLaMA-7B", "LoRA, dropout") == layers.counted("BERT", "LoRA") == {}
