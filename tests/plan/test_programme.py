"""The programme's optimum is that of all choices for all blocks, one by one."""

import random
from itertools import product
from typing import Any

import pytest

from fitact.planning.programme import fastest, least, peak, seconds
from fitact.runtime.choose import Cost, Segment
from fitact.runtime.measure import Work


def cost(saved: int, peak: int, seconds: float, host: int = 0) -> Cost:
    return Cost(saved, peak, Work(seconds), host)


def segment(count: int, grads: int, *costs: Cost) -> Any:
    """Return equal blocks, whose policies are numbers here."""
    return Segment(("",) * count, grads, dict(enumerate(costs)))


def stages(seed: int, counts: tuple[int, ...]) -> list[Any]:
    rng = random.Random(seed)
    grads = rng.choice([0, 5, 60])

    def option() -> Cost:
        saved = rng.randrange(1, 100)
        host = rng.choice([0, rng.randrange(50)])
        return cost(saved, saved + rng.randrange(80), rng.randrange(1, 40) / 7, host)

    return [segment(n, rng.randrange(grads + 1), *(option() for _ in range(3))) for n in counts]


def everything(given: list[Any]) -> list[tuple[int, float, int]]:
    """Return peak, time and bytes on the host of every sequence of options."""
    results = []
    for chosen in product(*(product(s.costs.values(), repeat=s.count) for s in given)):
        blocks = [(s.grads, option) for s, some in zip(given, chosen, strict=True) for option in some]
        level = most = 0
        for at, (_, option) in enumerate(blocks, 1):
            most = max(most, level + option.peak + sum(grads for grads, _ in blocks[at:]))
            level += option.saved
        taken = [option for _, option in blocks]
        results.append((most, sum(each.work.seconds for each in taken), sum(each.host for each in taken)))
    return results


# The last three seeds tell the sum of times from that of their roots.
@pytest.mark.parametrize("seed", [0, 1, 2, 6, 7, 19])
@pytest.mark.parametrize("counts", [(5,), (1, 2, 1, 1)])
def test_the_optimum_is_that_of_brute_force(seed: int, counts: tuple[int, ...]) -> None:
    given = stages(seed, counts)
    answers = everything(given)
    largest = max(pinned for *_, pinned in answers)
    for host in (largest // 3, largest):
        every = [(most, time) for most, time, pinned in answers if pinned <= host]
        low = min((most for most, _ in every), default=0)
        assert low == 0 or least(given, host) == low
        assert fastest(given, low - 1, host) is None
        high = max((most for most, _ in every), default=0)
        for room in (low, *(low + (high - low) * k // 4 for k in range(1, 4)), high) if every else ():
            options = fastest(given, room, host)
            assert [len(some) for some in options] == [s.count for s in given]
            assert peak(given, options) <= room
            chosen = [s.costs[i] for s, some in zip(given, options, strict=True) for i in some]
            assert sum(each.host for each in chosen) <= host
            best = min(time for most, time in every if most <= room)
            assert seconds(given, options) == pytest.approx(best, rel=1e-9)


def test_of_equals_the_first_is_taken() -> None:
    given = [segment(4, 0, cost(9, 9, 1.0), cost(8, 9, 1.0), cost(8, 9, 1.0))]
    assert fastest(given, 33) == [[1, 1, 1, 1]]


def test_many_blocks_of_many_ways_in_gigabytes() -> None:
    """A budget of a model's size is met to the byte, though the solver works with a tolerance."""
    gib = 2**30
    options = tuple(cost(gib * (13 - k) // 5 + k, 3 * gib + k, 1 + k * k / 100) for k in range(0, 12, 3))
    given = [segment(1, gib, cost(gib, gib, 0.1)), segment(32, 7 * 2**20, *options)]
    for room in (40 * gib, 70 * gib - 1):
        assert peak(given, fastest(given, room)) <= room
