"""What reports share: a dictionary, a table with bars in notebooks, and a picture."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

from .files import write
from .pictures import blank, defaults, format_of, literal, save
from .text import three

COLORS = ("#8d99ae", "#1f4e79")  # of the series
WIDTH = 35  # of the column of bars in a notebook, in per cent: so the numbers beside it are seen on a phone, too


@dataclass(frozen=True)
class Bars:
    """Bytes as bars.

    Attributes:
        title: what is shown.
        quantity: what the bars measure, such as `"saved for backward"`.
        series: names of the bars in each row.
        rows: a name, and the bytes of each series.

    """

    title: str
    quantity: str
    series: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]

    @property
    def unit(self) -> tuple[int, str]:
        """The largest unit that the longest bar has, and its name."""
        longest = max((value for _, values in self.rows for value in values), default=0)
        units = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")
        return next((unit for unit in units if longest >= unit[0]), (1, "bytes"))

    def number(self, value: float) -> str:
        """Return a number of bytes in the unit."""
        return three(value / self.unit[0]) if value else "0"

    def html(self) -> str:
        """Return a table for notebooks."""
        _, unit = self.unit
        longest = max(1.0, *(value for _, values in self.rows for value in values))
        pairs = zip(COLORS, self.series, strict=True) if len(self.series) > 1 else ()
        key = "".join(f' <span style="color:{color}">■</span> {name}' for color, name in pairs)
        lines = ['<table style="min-width:60%">']
        lines += [f"<caption><b>{escape(self.title)}</b><br>{escape(self.quantity)}, {unit}{key}</caption>"]
        for name, values in self.rows:
            bar = "".join(
                f'<div style="background:{color};height:0.7em;width:{100 * value / longest:.1f}%"></div>'
                for color, value in zip(COLORS[-len(values) :], values, strict=True)
            )
            numbers = " → ".join(map(self.number, values))
            lines += [
                f'<tr><td style="text-align:left">{re.sub("(?<=[._])", "<wbr/>", escape(name))}</td>',
                f'<td style="width:{WIDTH}%">{bar}</td>',
                f'<td style="text-align:right;white-space:nowrap">{numbers}</td></tr>',
            ]
        return "\n".join([*lines, "</table>"])

    @defaults()
    def draw(self, format: str) -> bytes:
        """Draw the bars; UsageError if the format is not `png`, `svg` or `pdf`."""
        size, unit = self.unit
        figure = blank(format, (9.0, 1.5 + 0.3 * len(self.rows) * len(self.series)))
        axes = figure.add_subplot()
        height = 0.8 / len(self.series)
        for i, (color, name) in enumerate(zip(COLORS[-len(self.series) :], self.series, strict=True)):
            values = [row[i] / size for _, row in self.rows]
            at = [j + (i - (len(self.series) - 1) / 2) * height for j in range(len(values))]
            drawn = axes.barh(at, values, height, color=color, label=name)
            axes.bar_label(drawn, [self.number(row[i]) for _, row in self.rows], padding=3, fontsize=8)
        axes.set_yticks(range(len(self.rows)), [literal(name, 60) for name, _ in self.rows])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(f"{literal(self.quantity, 80)}, {unit}")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.suptitle(literal(self.title, 100), fontweight="bold", fontsize=11)
        if len(self.series) > 1:
            axes.legend(frameon=False, fontsize=8.5, loc="lower right")
        return save(figure, format)


class Shown(ABC):
    """A report, which is a dataclass: how it is shown in other ways than as text."""

    @abstractmethod
    def bars(self) -> Bars:
        """Return its bytes as bars; UsageError if it has none."""

    def draw(self, format: str) -> bytes:
        """Return its picture as a PNG, SVG or PDF."""
        return self.bars().draw(format)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as dictionaries, lists, numbers and texts, as JSON has them."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(cast("Any", self))))
        return fields

    def plot(self, path: str | Path | None = None, format: str = "png") -> bytes:
        """Draw the report.

        Args:
            path: where to write the picture; its ending gives the format. By default it is only returned.
            format: `png`, `svg` or `pdf`, without a path.

        Returns:
            The picture's bytes; the same report gives the same bytes.

        Raises:
            UsageError: the format is another one, or nothing was measured that could be drawn.

        """
        data = self.draw(format if path is None else format_of(Path(path)))
        if path is not None:
            write(Path(path), data)
        return data

    def _repr_html_(self) -> str:
        text = f'<pre style="overflow:auto">{escape(str(self))}</pre>'
        try:
            return f"{self.bars().html()}\n<details><summary>as text</summary>{text}</details>"
        except ValueError:  # UsageError: nothing was measured
            return text
