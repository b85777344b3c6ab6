"""The integer programme: how many blocks of each run have which policy, so that a step takes least time.

A step's memory, above what is fixed, is followed from block to block. Let the blocks be numbered as the forward
pass reaches them. Let block i save kᵢ bytes, rise to at most hᵢ bytes above what was there, and leave gradients
of gᵢ bytes. While block j runs backward, the blocks before it still hold what they saved, and those after it
have left their gradients:

    memory(j) = k₁ + … + k₍ⱼ₋₁₎ + hⱼ + g₍ⱼ₊₁₎ + … + gₙ

and the peak is the largest of these. In a run of like blocks only the number of blocks with each policy matters,
once their order is fixed: the order with the lowest peak has first those whose k is below g, by rising h, then
the others, by falling h − k. (Two neighbours that are the other way round can be swapped, and the peak does not
rise.)

The bytes that blocks pin on the host add up, and have a limit of their own. Time adds up, too: how long a block
waits for the link is measured among blocks like itself, and is a part of its seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fitact.base import JobError

TOLERANCE = 10**6  # of the solver, as a part of the room


@dataclass(frozen=True)
class Option:
    """A policy for one block of a run.

    Attributes:
        saved: bytes that it saves from its forward to its backward pass.
        high: the most bytes alive in either of its passes, above what was there before it ran forward.
        seconds: what both passes take.
        host: bytes that it pins on the host.

    """

    saved: int
    high: int
    seconds: float
    host: int = 0


@dataclass(frozen=True)
class Stage:
    """Equal blocks that follow one another.

    Attributes:
        count: how many there are.
        grads: bytes of gradients that each leaves.
        options: what each may become; of equal ones only the first is taken.

    """

    count: int
    grads: int
    options: tuple[Option, ...]

    def order(self) -> list[int]:
        """Return the options in the order in which the blocks of the stage should have them."""

        def rank(i: int) -> tuple[int, int]:
            option = self.options[i]
            return (0, option.high) if option.saved < self.grads else (1, option.saved - option.high)

        return sorted(range(len(self.options)), key=rank)

    def useful(self) -> list[int]:
        """Return the options that no other one beats or equals in all four numbers."""
        numbers = [(option.saved, option.high, option.seconds, option.host) for option in self.options]

        def beats(i: int, j: int) -> bool:
            return all(a <= b for a, b in zip(numbers[i], numbers[j], strict=True)) and (
                numbers[i] != numbers[j] or i < j
            )

        every = range(len(numbers))
        return [j for j in every if not any(beats(i, j) for i in every if i != j)]


Counts = tuple[tuple[int, ...], ...]  # for each stage and option, of how many blocks


def arranged(stages: Sequence[Stage], counts: Counts) -> list[list[int]]:
    """Return the option of each block of each stage, in the order with the lowest peak."""
    return [
        [i for i in stage.order() for _ in range(numbers[i])]
        for stage, numbers in zip(stages, counts, strict=True)
    ]


def peak(stages: Sequence[Stage], options: Sequence[Sequence[int]]) -> int:
    """Return the most bytes alive in a step.

    Args:
        stages: the stages.
        options: the option of each block of each stage, in the order of the blocks.

    """
    level, most = 0, 0
    grads = sum(stage.count * stage.grads for stage in stages)
    for stage, chosen in zip(stages, options, strict=True):
        for i in chosen:
            grads -= stage.grads
            most = max(most, level + stage.options[i].high + grads)
            level += stage.options[i].saved
    return most


def seconds(stages: Sequence[Stage], options: Sequence[Sequence[int]]) -> float:
    """Return what a step takes."""
    return sum(stage.options[i].seconds for stage, chosen in zip(stages, options, strict=True) for i in chosen)


def fastest(stages: Sequence[Stage], room: int, host: int = 0) -> list[list[int]] | None:
    """Return the options of the fastest step whose peak is at most `room` bytes.

    SciPy's `milp` solves the programme by branch and bound. The optimum is exact, but for a few millionths of
    `room`, which is the solver's tolerance.

    Args:
        stages: the stages.
        room: bytes.
        host: the most bytes that may be pinned on the host.

    Returns:
        The option of each block of each stage; None if nothing fits.

    """
    limit = room
    for _ in range(8):
        solved = _solved(stages, limit, host)
        if solved is None:
            return None
        options = arranged(stages, solved)
        over = peak(stages, options) - room
        if over <= 0:
            return options
        limit -= over + room // TOLERANCE  # the solver let it pass: ask for that much less
    return None


def least(stages: Sequence[Stage], host: int = 0) -> int:
    """Return the lowest peak of all options that pin no more than `host` bytes, to a millionth."""
    none = [
        min(range(len(stage.options)), key=[option.host for option in stage.options].__getitem__)
        for stage in stages
    ]
    low, high = 0, peak(stages, [[i] * stage.count for i, stage in zip(none, stages, strict=True)])
    while high - low > high // TOLERANCE:
        middle = (low + high) // 2
        options = fastest(stages, middle, host)
        low, high = (middle + 1, high) if options is None else (low, peak(stages, options))
    return high


def _solved(stages: Sequence[Stage], room: int, host: int) -> Counts | None:
    """Solve the programme; bytes and seconds are scaled to numbers near 1.

    Variables: for each stage and option the number n of blocks, an integer, and whether there are any, u.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    places: list[list[int]] = []
    total = 0
    for stage in stages:
        places.append(list(range(total, total + len(stage.options))))
        total += len(stage.options)
    scale = max(room, 1)
    rows: list[Any] = []
    lower: list[float] = []
    upper: list[float] = []

    def constrain(row: Any, low: float, high: float) -> None:
        rows.append(row)
        lower.append(low)
        upper.append(high)

    before = np.zeros(2 * total)  # bytes saved by earlier stages
    grads = sum(stage.count * stage.grads for stage in stages)
    worst = 0  # the most that they can save
    for stage, place in zip(stages, places, strict=True):
        row = np.zeros(2 * total)
        row[place] = 1
        constrain(row, stage.count, stage.count)
        grads -= stage.count * stage.grads
        ahead = before.copy()  # saved and given up by the blocks before, of this stage too
        useful, most = stage.useful(), 0
        for i in stage.order():
            if i not in useful:
                unused = np.zeros(2 * total)
                unused[place[i]] = 1
                constrain(unused, 0, 0)
                continue
            option, n, u = stage.options[i], place[i], total + place[i]
            link = np.zeros(2 * total)
            link[n], link[u] = 1, -stage.count
            constrain(link, -np.inf, 0)
            base = grads + (stage.count - 1) * stage.grads + option.high
            gain = option.saved - stage.grads
            most = max(most, gain)
            big = max(0, worst + stage.count * most + base + max(-gain, 0) - room)  # lifts the limit where u is 0
            first = ahead.copy()
            first[u] += big
            constrain(first / scale, -np.inf, (room - base + big) / scale)
            ahead[n] += gain
            last = ahead.copy()
            last[u] += big
            constrain(last / scale, -np.inf, (room - base + gain + big) / scale)
        for i in place:
            before[i] += stage.options[i - place[0]].saved
        worst += stage.count * max(option.saved for option in stage.options)
    pinned = np.array([option.host for stage in stages for option in stage.options], dtype=float)
    if pinned.any():
        constrain(np.concatenate([pinned, np.zeros(total)]) / max(host, 1), -np.inf, host / max(host, 1))
    times = np.array([option.seconds for stage in stages for option in stage.options])
    unit = max(float(times.max()), 1e-30)
    bounds = np.array([stage.count for stage in stages for _ in stage.options] + [1] * total, dtype=float)
    result = milp(
        np.concatenate([times / unit, np.zeros(total)]),
        constraints=LinearConstraint(np.array(rows), lower, upper),
        bounds=Bounds(0, bounds),
        integrality=np.ones(2 * total),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        if result.status != 2:  # it is not that nothing fits
            raise JobError(f"the integer programme could not be solved: {result.message}")
        return None
    numbers = np.rint(result.x[:total]).astype(int)
    return tuple(tuple(int(numbers[i]) for i in place) for place in places)
