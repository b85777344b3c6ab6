"""The largest batch or the longest sequence for which a plan fits a memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fitact.errors import JobError
from fitact.runtime.choose.capacity import Curve

from .make import Planner, check
from .record import GIB, Plan


def largest(
    planner: Callable[[int], Planner],
    *,
    gib: float,
    error: str,
    here: int,
    limit: int | None = None,
    degree: int = 1,
    front: bool = True,
) -> tuple[int, Plan]:
    """Find the largest size with which a step fits a memory, and plan it.

    The least memory of a few sizes is measured. The size where their polynomial meets the memory is tried, and the
    polynomial is moved to what that size takes, until one size fits and the next does not.

    Args:
        planner: the planner of a size.
        gib: the memory of a step in GiB.
        error: how far gradients may be off, as for `fitact.plan`.
        here: a size to begin with.
        limit: the largest possible size; None if there is none.
        degree: of the polynomial: 1 for batches, 2 for lengths of sequences.
        front: as for `fitact.plan`.

    Returns:
        The size, and the plan.

    Raises:
        JobError: not even a size of 1 fits.
        UsageError: an argument is not valid.

    """
    check(gib, error)
    planners = cache(planner)
    start = here if limit is None else max(1, min(here, limit // (degree + 1)))
    nodes = [start * k for k in range(1, degree + 2) if limit is None or start * k <= limit]
    curve = Curve(lambda size: planners(size).least(error), limit, nodes)
    size = curve.largest(int(gib * GIB))
    if not size:
        needed = curve.measure(1) / GIB
        raise JobError(f"not even 1 fits {gib:g} GiB: that takes at least {needed:.3g} GiB")
    return size, planners(size).plan(gib, error, front=front)
