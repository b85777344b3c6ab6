"""Reports as dictionaries, as tables of notebooks and as pictures."""

import json
import re
import xml.etree.ElementTree as ET
from collections import OrderedDict
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fitact
from fitact.base import Bars, UsageError
from fitact.runtime.choose import measure
from fitact.runtime.measure.reference import gelu_mlp

X = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


def odd() -> nn.Module:
    """Return a block whose names HTML would read as tags."""
    parts = {"<i>0": nn.Linear(64, 256), "<i>1": nn.GELU(), "<i>2": nn.Linear(256, 64)}
    return nn.Sequential(OrderedDict({"<b>&": nn.Sequential(OrderedDict(parts))}))


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    model = nn.Sequential(odd(), odd())
    plan, short = (fitact.plan(model, gib=gib, example_inputs=X, device="a100") for gib in (1, 1e-5))
    conversion = fitact.convert(model, error="rounding", example_inputs=X)
    return {"convert": conversion, "memory": measure(gelu_mlp, budgets=()), "plan": plan, "short": short}


@pytest.mark.parametrize("name", ["convert", "memory", "plan", "short"])
def test_shown(name: str, reports: dict[str, Any], tmp_path: Path) -> None:
    report = reports[name]
    actual = report.to_dict()
    assert json.loads(json.dumps(actual)) == actual
    if hasattr(report, "to_json"):
        stored = json.loads(report.to_json())
        assert stored == {"schema": stored["schema"]} | actual
    html = report._repr_html_()
    whole: Any = re.fullmatch(r"(<table .*</table>)\n<details>.*<pre [^>]*>(.*)</pre></details>", html, re.DOTALL)
    table, text = whole.groups()
    assert unescape(text) == str(report)
    root = ET.fromstring(table.replace("<br>", "<br/>"))
    bars: Bars = report.bars()
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert [row[0] for row in rows] == [label for label, _ in bars.rows]
    styles = [each.get("style", "") for each in root.iter("div")]
    widths = [float(width) for style in styles for width in re.findall(r"width:([\d.]+)%", style)]
    values = [value for _, each in bars.rows for value in each]
    assert widths == pytest.approx([100 * value / max(values) for value in values], abs=0.051)
    for kind in ("png", "svg", "pdf"):
        report.plot(tmp_path / f"a.{kind}")
        assert (tmp_path / f"a.{kind}").read_bytes() == report.plot(format=kind)
    with pytest.raises(UsageError, match="expected png, svg or pdf"):
        report.plot(format="gif")


def test_what_is_drawn(reports: dict[str, Any]) -> None:
    """Titles state the numbers of the bars; axes have names and units."""
    bars = reports["convert"].bars()
    before, after = (sum(values[i] for _, values in bars.rows) for i in (0, 1))
    assert (before, after) == (reports["convert"].saved_before, reports["convert"].saved_after)
    share = f"{before / 2**20:.1f} MiB, {100 * after / before:.1f} %"
    assert bars.title == f"The model saves {after:,} bytes for backward instead of {share}"
    assert bars.quantity == "saved for backward in *.<b>&" and "<i>1 ×2" in dict(bars.rows)
    picture = reports["convert"].plot(format="svg").decode()
    for text in (f"saved for backward in *.&lt;b&gt;&amp;, {bars.unit[1]}", "before", "now", "&lt;i&gt;1"):
        assert text in picture
    assert "fits as it is" in reports["plan"].bars().title and "does not fit" in reports["short"].bars().title
    assert [label for label, _ in reports["short"].bars().rows][1] == "the least"
    assert "the least of a step" in reports["short"].plot(format="svg").decode()
    full = next(row for row in reports["memory"].rows if row.name == "checkpointing, full")
    assert full.kinds == {"checkpoint": full.bytes}
    assert "checkpointing, full" in reports["memory"].plot(format="svg").decode()


def test_nothing_measured() -> None:
    report = fitact.convert(nn.Sequential(odd()))
    assert report._repr_html_() == f'<pre style="overflow:auto">{escape(str(report))}</pre>'
    with pytest.raises(UsageError, match="nothing was measured: give example_inputs"):
        report.plot()
