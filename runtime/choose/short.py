"""Rows of like blocks cut short: where many go the same way, some run, and one of them stands for the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from unittest import mock

from torch import nn

from fitact.runtime.measure.meter import Mark

from .subjects import Run, first_tensor
from .ways import Way

ROW = 4  # blocks of a row that run: the first two, one whose neighbours are like itself, and the last


def cut(runs: Sequence[Run], ways: Sequence[Way], row: int = ROW) -> dict[int, int]:
    """Return how many of the blocks after it a block stands for, by its place.

    Args:
        runs: the runs of blocks.
        ways: the way of each block.
        row: how many blocks run where more in a row go the same way.

    """
    found: dict[int, int] = {}
    place = 0
    for run in runs:
        end = place + len(run.blocks)
        for _, some in groupby(ways[place:end]):
            count = len(list(some))
            if run.steady and count > row:
                found[place + row - 2] = count - row
            place += count
    return found


@contextmanager
def skipped(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let blocks return their input until the context ends."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(mock.patch.object(block, "forward", first_tensor))
        yield


def filled(marks: Sequence[Mark], standing: Mapping[int, int]) -> list[Mark]:
    """Return the marks of a step as if skipped blocks had done what the block that stands for them did.

    Args:
        marks: of the step, without marks of the skipped blocks.
        standing: as `cut` returns it.

    """
    found: list[tuple[Mark, int, int]] = []  # with the level's change, and the peak's rise above the level before
    level = 0
    for mark in marks:
        found.append((mark, mark.level - level, mark.peak - level))
        level = mark.level
    for block, count in standing.items():
        places: dict[tuple[str, int], int] = {}
        for i, (mark, _, _) in enumerate(found):
            places.setdefault((mark.what, mark.block), i)
        begin, end = places.get(("grad out", block)), places.get(("grad out", block - 1))
        if begin is not None and end is not None:  # what is frozen has no backward pass
            part = found[begin + 1 : end + 1]
            copies = [_moved(one, block, k) for k in range(count, 0, -1) for one in part]
            found[begin : begin + 1] = [_moved(found[begin], block, count), *copies]
        begin, end = places["out", block - 1], places["out", block]
        part = found[begin + 1 : end + 1]
        found[end + 1 : end + 1] = [_moved(one, block, k) for k in range(1, count + 1) for one in part]
    level, result = 0, []
    for mark, change, rise in found:
        result.append(replace(mark, level=level + change, peak=level + rise))
        level += change
    return result


def _moved(found: tuple[Mark, int, int], block: int, by: int) -> tuple[Mark, int, int]:
    """Return a mark of a block, or of its neighbour, as that of a later block."""
    mark, change, rise = found
    return (replace(mark, block=mark.block + by) if mark.block >= block - 1 else mark), change, rise
