"""benchmarks/gpu, rehearsed on a CPU: every part to its end, killed, resumed, and its tables."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import tables
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.batch import CHECKPOINTED, MOST, PLANS, most
from benchmarks.gpu.record import Record
from benchmarks.gpu.variants import VARIANTS
from tests.conftest import ROOT
from tests.support.compilers import needs_compiler

pytestmark = pytest.mark.filterwarnings("default::FutureWarning", "default::UserWarning")  # of peft and others
Rows = list[dict[str, Any]]


def record(part: str, folder: Path, **options: Any) -> Record:
    given = {"seconds": 1e4, "only": (), "resume": False, "device": "cpu", "tiny": True} | options
    return Record(part, folder, **given)


def rows_of(path: Path) -> Rows:
    return json.loads(path.read_text("utf-8"))["rows"]


def rehearsed(part: str, folder: Path, *only: str) -> Rows:
    """Run a part; return its rows, none of which may have failed, but for Liger's, which need a GPU.

    The page has a line for each row, and says that this was a rehearsal.
    """
    import_module(f"benchmarks.gpu.{part}").run(record(part, folder, only=only), "cpu", True)
    rows = rows_of(folder / f"{part}.json")
    measured = [row for row in rows if "error" not in row]
    assert not [row for row in rows if "skipped" in row]
    assert all("Liger" in row["variant"] for row in rows if row not in measured)
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    text = tables.filled(page, tables.results(folder))
    assert (text.count("a rehearsal with tiny sizes"), text.count(tables.NOTHING)) == (1, len(PARTS) - 1)
    lines = [line for line in text.splitlines() if line.startswith(("| ", "- ")) and "---" not in line]
    names = [row.get("variant", row.get("plan")) for row in rows if "test" not in row]
    assert all(any(str(name) in line for line in lines) for name in names if name)
    assert tables.filled(text, {}) == tables.filled(page, {})
    return measured


@pytest.mark.long
@pytest.mark.full
def test_correctness(tmp_path: Path) -> None:
    """Each model in one of the precisions, and the other without a change of the model."""
    rows = rehearsed("correctness", tmp_path, "tests/", "LoRA bfloat16", "ViT-L autocast", "baseline, again")
    (total,) = (row for row in rows if "tests" in row)
    tests = [row["outcome"] for row in rows if "test" in row]
    assert total["passed"] == len(tests) > 2 and {*tests} == {"passed"}
    gradients = [row for row in rows if "equal" in row]
    assert len({(row["model"], row["precision"]) for row in gradients}) == 4
    exact = [row for row in gradients if VARIANTS[row["variant"]].exact]
    assert all(row["equal"] == row["of"] and row["gradient_off"] == 0 for row in exact)
    assert 0 < max(row["gradient_off"] for row in gradients) < 0.2


def test_steps(tmp_path: Path) -> None:
    rows = {row["variant"]: row for row in rehearsed("steps", tmp_path, "LLaMA")}
    plain = {name for name, variant in VARIANTS.items() if not variant.compiled and variant.kind is None}
    assert rows.keys() == plain and all(row["ms"] > 0 for row in rows.values())
    saved = {name: row["saved_mib"] for name, row in rows.items()}
    assert saved["checkpointing"] < saved["exact"] < saved["baseline"] == saved["baseline, again"]


@pytest.mark.full
@needs_compiler
def test_compiled_steps(tmp_path: Path) -> None:
    assert [row["variant"] for row in rehearsed("steps", tmp_path, "ViT-L fitact.compile")] == ["fitact.compile"]


def test_kernels(tmp_path: Path) -> None:
    rows = {(row["function"], row["dtype"], row["variant"]): row for row in rehearsed("kernels", tmp_path)}
    assert rows["gelu", "bfloat16", "gelu_fewbit3"]["saved_bytes"] == 3 / 8
    assert rows["gelu", "float32", "eager"]["saved_bytes"] == 4
    assert rows["swiglu", "bfloat16", "swiglu_recompute"]["saved_bytes"] == 4
    assert ("rms_norm", "bfloat16", "memory-sharing") in rows
    assert rows["block codes", "bfloat16", "8 bits"]["saved_bytes"] == 1 + 0.3125 / 8
    for row in rows.values():  # of the moved bytes, by hand from the record's own columns
        moved = row["forward_share"] * row["forward_ms"] * 1e6 * row["copy_gb_per_s"] / row["elements"]
        tensors = {"swiglu": 3, "geglu": 3, "block codes": 1}.get(row["function"], 2)
        tensors *= 4 if row["dtype"] == "float32" else 2
        assert tensors - 0.01 <= moved <= tensors + row["saved_bytes"] + 0.1


@pytest.mark.long
@pytest.mark.full
def test_batch(tmp_path: Path) -> None:
    rows = rehearsed("batch", tmp_path)
    plans = {path.stem for path in PLANS.glob("*.json")}
    assert {row["plan"] for row in rows if "plan" in row} == plans | {CHECKPOINTED} > {"exact_24", CHECKPOINTED}
    largest = {(row["model"], row["variant"]): row["size"] for row in rows if "size" in row}
    for model in ("LLaMA-7B, LoRA", "ViT-L"):
        assert largest[model, "checkpointing"] > largest[model, "exact"] > largest[model, "baseline"] > 0


def test_training(tmp_path: Path) -> None:
    rows = rehearsed("training", tmp_path)
    assert {row["variant"] for row in rows} == {"baseline", "exact", "checkpointing"}
    assert len({(row["first_loss"], row["last_loss"]) for row in rows}) == 1  # bit for bit the same training


def test_a_row_that_fails_and_no_time(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("out of luck")

    measuring = record("steps", tmp_path, only=["wanted"])
    measuring.measure({"variant": "wanted 1"}, fails)
    measuring.measure({"variant": "other"}, lambda: {"ms": 1.0})
    measuring.allowed = 0.0
    measuring.measure({"variant": "wanted 2"}, lambda: {"ms": 1.0})
    first, second = rows_of(tmp_path / "steps.json")
    assert (first["variant"], first["error"]) == ("wanted 1", "RuntimeError: out of luck")
    assert second == {"variant": "wanted 2", "skipped": "no time left"}
    again = record("steps", tmp_path, resume=True)
    for name in ("wanted 1", "wanted 2"):
        again.measure({"variant": name}, lambda: {"ms": 1.0})
    assert ["error" in row for row in rows_of(tmp_path / "steps.json")] == [True, False]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 100, 1023, 4095])
def test_the_largest_that_fits(limit: int) -> None:
    assert most(limit.__ge__) == limit < MOST


def test_tables_of_a_gpu() -> None:
    common = {"model": "LLaMA-7B", "batch": 8, "tokens": 2048, "saved_mib": 10.0}
    rows = [
        common | {"variant": "baseline", "ms": 2.0, "host_ms": 1.0, "peak_mib": 2000.0},
        common | {"variant": "exact", "ms": 3.0, "host_ms": 2.5, "graphed_ms": 1.8, "peak_mib": 1000.0},
        common | {"variant": "baseline, in another run", "ms": 4.0},
        common | {"variant": "rounding, in another run", "ms": 5.0, "peak_mib": 500.0},
        {"model": "LLaMA-7B", "variant": "coarse", "error": "OutOfMemoryError: CUDA\nout of memory"},
        {"model": "ViT-L", "variant": "exact", "skipped": "no time left"},
    ]
    head = {"device": {"name": "H100"}, "versions": {"torch": "2.11.0", "timm": None}, "date": "today"}
    actual = {"steps": {**head, "tiny": False, "commit": None, "rows": rows}}
    text = tables.filled("<!-- gpu: steps -->\nold\n<!-- end -->\n<!-- gpu: summary --><!-- end -->", actual)
    steps, summary = text.split("<!-- gpu: summary -->")
    assert "H100, today, commit unknown, torch 2.11.0." in steps and "H100, PyTorch 2.11.0, today" in summary
    assert "old" not in text
    assert "| exact | 3.00 | 2.50 | 1.80 | 1.50 | 10.0 | 1,000.0 | 0.50 |" in steps
    assert "| rounding, in another run | 5.00 | — | — | 1.25 | 10.0 | 500.0 | 0.25 |" in steps
    assert "| exact | 3.00 | 1.50 | 10.0 | 1,000.0 | 0.50 |" in summary
    assert "- LLaMA-7B, coarse: `OutOfMemoryError: CUDA out of memory`" in steps
    assert "No time was left for 1 rows." in steps
