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
from dataclasses import astuple, dataclass
from operator import attrgetter, le
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
        numbers = [astuple(option) for option in self.options]
        return [
            i
            for i, own in enumerate(numbers)
            if numbers.index(own) == i and not any(other != own and all(map(le, other, own)) for other in numbers)
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
        options = _solved(stages, limit, host)
        if options is None:
            return None
        over = peak(stages, options) - room
        if over <= 0:
            return options
        limit -= over + room // TOLERANCE  # the solver let it pass: ask for that much less
    return None


def least(stages: Sequence[Stage], host: int = 0) -> int:
    """Return the lowest peak of all options that pin no more than `host` bytes, to a millionth."""
    none = [stage.options.index(min(stage.options, key=attrgetter("host"))) for stage in stages]
    low, high = 0, peak(stages, [[i] * stage.count for i, stage in zip(none, stages, strict=True)])
    while high - low > high // TOLERANCE:
        middle = (low + high) // 2
        options = fastest(stages, middle, host)
        low, high = (middle + 1, high) if options is None else (low, peak(stages, options))
    return high


def _solved(stages: Sequence[Stage], room: int, host: int) -> list[list[int]] | None:
    """Solve the programme, and return the option of each block of each stage, in the order with the lowest peak.

    Variables: for each stage and option the number n of blocks, an integer, and whether there are any, u. Bytes
    and seconds are scaled to numbers near 1.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    total = sum(len(stage.options) for stage in stages)
    places = np.split(np.arange(total), np.cumsum([len(stage.options) for stage in stages])[:-1])
    unit = np.eye(2 * total)  # a row for each variable: first each n, then each u
    scale = max(room, 1)
    constraints: list[tuple[Any, float, float]] = []  # each a row, and its bounds
    before = np.zeros(2 * total)  # bytes saved by earlier stages
    grads = sum(stage.count * stage.grads for stage in stages)
    worst = 0  # the most that they can save
    for stage, place in zip(stages, places, strict=True):
        constraints.append((unit[place].sum(axis=0), stage.count, stage.count))
        grads -= stage.count * stage.grads
        ahead = before  # saved and given up by the blocks before, of this stage too
        useful, most = stage.useful(), 0
        for i in stage.order():
            option, n, u = stage.options[i], unit[place[i]], unit[total + place[i]]
            if i not in useful:
                constraints.append((n, 0, 0))
                continue
            constraints.append((n - stage.count * u, -np.inf, 0))
            base = grads + (stage.count - 1) * stage.grads + option.high
            gain = option.saved - stage.grads
            most = max(most, gain)
            big = max(0, worst + stage.count * most + base + max(-gain, 0) - room)  # lifts the limit where u is 0
            constraints.append(((ahead + big * u) / scale, -np.inf, (room - base + big) / scale))
            ahead = ahead + gain * n
            constraints.append(((ahead + big * u) / scale, -np.inf, (room - base + gain + big) / scale))
        saved = [option.saved for option in stage.options]
        before = before + saved @ unit[place]
        worst += stage.count * max(saved)
    each = [(option.seconds, option.host) for stage in stages for option in stage.options]
    times, pinned = np.array(each).T @ unit[:total]
    if pinned.any():
        constraints.append((pinned / max(host, 1), -np.inf, host / max(host, 1)))
    rows, lower, upper = zip(*constraints, strict=True)
    bounds = np.array([stage.count for stage in stages for _ in stage.options] + [1] * total, dtype=float)
    result = milp(
        times / max(float(times.max()), 1e-30),
        constraints=LinearConstraint(np.array(rows), lower, upper),
        bounds=Bounds(0, bounds),
        integrality=np.ones(2 * total),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        if result.status != 2:  # it is not that nothing fits
            raise JobError(f"the integer programme could not be solved: {result.message}")
        return None
    counts = np.rint(result.x).astype(int)
    return [
        [i for i in stage.order() for _ in range(counts[place[i]])]
        for stage, place in zip(stages, places, strict=True)
    ]
