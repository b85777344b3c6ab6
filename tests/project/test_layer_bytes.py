"""benchmarks/layers: what layers save, in the documents and again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import layers
from tests.conftest import ROOT

ROWS: list[dict[str, Any]] = json.loads(layers.RESULTS.read_text("utf-8"))["rows"]
DOCUMENT = (ROOT / "docs" / "saving.md").read_text("utf-8")


def test_the_documents_table() -> None:
    lines = layers.table(ROWS)
    assert "\n".join(lines) in DOCUMENT
    assert [(row["layer"], row["training"]) for row in ROWS] == [
        (name, training) for name in layers.LAYERS for training in layers.TRAININGS
    ]
    assert "Everywhere *exact* saves least" in DOCUMENT
    assert not any(row["again"] for row in ROWS)  # so says the text of the compiler's products


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['layer']}-{row['training']}")
def test_nothing_that_computes_no_product_again_saves_less(row: dict[str, Any]) -> None:
    saved = row["saved"]
    assert saved["coarse"] < saved["rounding"] < saved["exact"]
    recomputed = {way for way in saved if way.endswith(", attention recomputed")}
    less = {way for way in saved if saved[way] < saved["exact"] and way not in row["again"]}
    assert less - recomputed == {"rounding", "coarse"}
    gained = {way: saved[way] - saved[f"{way}, attention recomputed"] for way in ("exact", "coarse")}
    of_t5 = (row["layer"], row["training"]) == ("T5, gated", "everything")
    assert gained == pytest.approx(
        {"exact": 8.5, "coarse": 8.0} if of_t5 else {"exact": 1.0, "coarse": 0.55}, abs=0.05
    )


@pytest.mark.parametrize("name", ["LLaMA-7B", pytest.param("BERT", marks=pytest.mark.full)])
def test_the_figures_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer tokens: what is saved for one is nearly the same."""
    monkeypatch.setattr(layers, "BATCH", 2)
    monkeypatch.setattr(layers, "SEQ", 64)
    (row,) = (row["saved"] for row in ROWS if (row["layer"], row["training"]) == (name, "everything"))
    numbers = layers.tokens(name) * layers.LAYERS[name][2]["hidden_size"] * 2
    for way in ("baseline", "exact", "rounding", "coarse", "coarse, attention recomputed"):
        one, two = (layers.bytes_saved(name, "everything", n, layers.WAYS[way]) for n in (1, 2))
        assert (two - one) / numbers == pytest.approx(row[way], rel=0.01)


def test_counts_of_others() -> None:
    """By hand, for LLaMA: 2 norms' inputs and outputs, q, k, v, o, and of the MLP g, u and their product."""
    wide = 688 / 256
    assert layers.counted("LLaMA-7B", "everything") == {"Liger": pytest.approx(2 + 2 + 4 + 3 * wide)}
    lora = layers.counted("LLaMA-7B", "LoRA")
    assert lora["unsloth"] == pytest.approx(2 + 2 + 4 + 2 * wide)
    assert lora["Liger"] == pytest.approx(2 + 2 + 4 + 3 * wide + 7 * 8 / 256)
    assert layers.counted("LLaMA-7B", "LoRA, dropout") == layers.counted("BERT", "LoRA") == {}
