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
from operator import le
from typing import Any

import numpy as np

from fitact.base import JobError
from fitact.runtime.choose import Cost, Policy, Segment

TOLERANCE = 10**6  # of the solver, as a part of the room
Answer = list[list[Policy]]  # for each segment, the policy of each of its blocks, in their order


def _useful(segment: Segment) -> list[Policy]:
    """Return the policies that no other one beats or equals, in the order in which the blocks should have them."""
    numbers: dict[tuple[float, ...], Policy] = {}
    for policy, cost in segment.costs.items():
        numbers.setdefault((cost.saved, cost.peak, cost.work.seconds, cost.host), policy)
    useful = [
        policy
        for own, policy in numbers.items()
        if not any(other != own and all(map(le, other, own)) for other in numbers)
    ]

    def rank(policy: Policy) -> tuple[int, int]:
        cost = segment.costs[policy]
        return (0, cost.peak) if cost.saved < segment.grads else (1, cost.saved - cost.peak)

    return sorted(useful, key=rank)


def _taken(segments: Sequence[Segment], answer: Answer) -> list[tuple[Segment, Cost]]:
    """Return each block's segment, and what it costs there."""
    pairs = zip(segments, answer, strict=True)
    return [(segment, segment.costs[policy]) for segment, chosen in pairs for policy in chosen]


def peak(segments: Sequence[Segment], answer: Answer) -> int:
    """Return the most bytes alive in a step."""
    level, most = 0, 0
    grads = sum(segment.count * segment.grads for segment in segments)
    for segment, cost in _taken(segments, answer):
        grads -= segment.grads
        most = max(most, level + cost.peak + grads)
        level += cost.saved
    return most


def seconds(segments: Sequence[Segment], answer: Answer) -> float:
    """Return what a step takes."""
    return sum(cost.work.seconds for _, cost in _taken(segments, answer))


def fastest(segments: Sequence[Segment], room: int, host: int = 0) -> Answer | None:
    """Return the fastest step with a peak of at most `room` bytes, and `host` bytes pinned; None if nothing fits.

    SciPy's `milp` solves the programme by branch and bound. The optimum is exact, but for a few millionths of
    `room`, which is the solver's tolerance.
    """
    limit = room
    for _ in range(8):
        answer = _solved(segments, limit, host)
        if answer is None:
            return None
        over = peak(segments, answer) - room
        if over <= 0:
            return answer
        limit -= over + room // TOLERANCE  # the solver let it pass: ask for that much less
    return None


def least(segments: Sequence[Segment], host: int = 0) -> int:
    """Return the lowest peak of all answers that pin no more than `host` bytes, to a millionth."""
    none = (min(segment.costs, key=lambda policy: segment.costs[policy].host) for segment in segments)
    low, high = 0, peak(segments, [[policy] * s.count for policy, s in zip(none, segments, strict=True)])
    while high - low > high // TOLERANCE:
        middle = (low + high) // 2
        answer = fastest(segments, middle, host)
        low, high = (middle + 1, high) if answer is None else (low, peak(segments, answer))
    return high


def _solved(segments: Sequence[Segment], room: int, host: int) -> Answer | None:
    """Solve the programme.

    Variables: for each segment and policy the number n of blocks, an integer, and whether there are any, u. Bytes
    and seconds are scaled to numbers near 1.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    useful = [_useful(segment) for segment in segments]
    total = sum(map(len, useful))
    variables = zip(*np.split(np.eye(2 * total), 2), strict=True)  # a row for each n, and one for its u
    scale = max(room, 1)
    constraints: list[tuple[Any, float, float]] = []  # each a row, and its bounds
    # rows: bytes saved by earlier segments, seconds, bytes on the host
    before = times = pinned = np.zeros(2 * total)
    grads = sum(segment.count * segment.grads for segment in segments)
    worst = 0  # the most that they can save
    for segment, policies in zip(segments, useful, strict=True):
        grads -= segment.count * segment.grads
        ahead = before  # saved and given up by the blocks before, of this segment too
        blocks, most = np.zeros(2 * total), 0
        for policy in policies:
            cost, (n, u) = segment.costs[policy], next(variables)
            constraints.append((n - segment.count * u, -np.inf, 0))
            base = grads + (segment.count - 1) * segment.grads + cost.peak
            gain = cost.saved - segment.grads
            most = max(most, gain)
            # lifts the limit where u is 0
            big = max(0, worst + segment.count * most + base + max(-gain, 0) - room)
            constraints.append(((ahead + big * u) / scale, -np.inf, (room - base + big) / scale))
            ahead = ahead + gain * n
            constraints.append(((ahead + big * u) / scale, -np.inf, (room - base + gain + big) / scale))
            blocks = blocks + n
            before = before + cost.saved * n
            times = times + cost.work.seconds * n
            pinned = pinned + cost.host * n
        constraints.append((blocks, segment.count, segment.count))
        worst += segment.count * max(segment.costs[policy].saved for policy in policies)
    if pinned.any():
        constraints.append((pinned / max(host, 1), -np.inf, host / max(host, 1)))
    rows, lower, upper = zip(*constraints, strict=True)
    bounds = [segment.count for segment, policies in zip(segments, useful, strict=True) for _ in policies]
    result = milp(
        times / max(float(times.max()), 1e-30),
        constraints=LinearConstraint(np.array(rows), lower, upper),
        bounds=Bounds(0, np.array([*bounds, *[1] * total], dtype=float)),
        integrality=np.ones(2 * total),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        if result.status != 2:  # it is not that nothing fits
            raise JobError(f"the integer programme could not be solved: {result.message}")
        return None
    counts = iter(np.rint(result.x).astype(int))
    return [[policy for policy in policies for _ in range(next(counts))] for policies in useful]
