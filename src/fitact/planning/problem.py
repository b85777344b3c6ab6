"""The programme of a model's costs: its answers, whether they fit as measured, and the front."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from fitact.runtime.choose.costs import Cost, Costs, Step, step
from fitact.runtime.choose.subjects import Subject
from fitact.runtime.choose.ways import FULL, OF_BLOCKS, REST, SELECTIVE, STOCK, Way
from fitact.runtime.measure.devices import Device
from fitact.runtime.saving import ERRORS

from .programme import Option, Stage, fastest, least, peak, seconds
from .record import Group, Point

WORTH = 1e-3  # of a step's time: a model that fits as it is, is not changed for less
TRIES = 6  # of budgets, until what the programme answers also fits as measured
FRONT = 9  # budgets of each line of the front
EVERY = {2: "second", 3: "third", 4: "fourth"}  # of the blocks, which are checkpointed

Answer = list[list[int]]


class Problem:
    """The programme of a model's costs, with the ways that an error allows.

    Attributes:
        costs: the costs.
        ways: for each segment the ways, in the order of the stages' options.
        stages: the programme's stages.

    """

    def __init__(self, costs: Costs, error: str) -> None:
        self.costs = costs
        most = ERRORS.index(error)
        self.ways = [
            [way for way in (*OF_BLOCKS, REST) if way in one.costs and ERRORS.index(way.error) <= most]
            for one in costs.segments
        ]
        self.stages = [
            Stage(one.count, one.grads, tuple(_option(one.costs[way]) for way in ways))
            for one, ways in zip(costs.segments, self.ways, strict=True)
        ]

    def every(self, way: Way, n: int = 1) -> Answer:
        """Return the answer in which every n-th block goes a way, where it can; the others stay as they are."""
        answer: Answer = []
        block = 0
        for segment, ways in zip(self.costs.segments, self.ways, strict=True):
            chosen = []
            for _ in range(segment.count):
                goes = way in ways and bool(segment.paths) and block % n == 0
                chosen.append(ways.index(way) if goes else 0)
                block += bool(segment.paths)
            answer.append(chosen)
        return answer

    def groups(self, answer: Answer) -> list[Group]:
        """Return the groups of blocks that go the same way, each in one part of the model."""
        paths = (path for segment in self.costs.segments for path in segment.paths)
        by_way = groupby(zip(self.taken(answer), paths, strict=True), itemgetter(0))
        found = [Group(way.name, tuple(path for _, path in some)) for way, some in by_way]
        return found if self.whole(answer) == STOCK else [*found, Group(REST.name, ("",))]

    def whole(self, answer: Answer) -> Way:
        """Return the way of the whole model, which is that of what follows its last block."""
        return self.ways[-1][answer[-1][0]]

    def taken(self, answer: Answer) -> list[Way]:
        """Return the way of each block."""
        return [
            ways[i]
            for segment, ways, chosen in zip(self.costs.segments, self.ways, answer, strict=True)
            for i in chosen[: len(segment.paths)]
        ]

    def frugal(self) -> Answer:
        """Return an answer with the lowest peak."""
        found = fastest(self.stages, slack(least(self.stages)))
        return found if found is not None else self.every(FULL)


def slack(room: int) -> int:
    """Return a little more room than is needed, for the solver's tolerance."""
    return room + room // 10**5


def _option(cost: Cost) -> Option:
    return Option(cost.keep, cost.high, cost.work.seconds)


def chosen(subject: Subject, device: Device, problem: Problem, room: int) -> tuple[list[Group], Step]:
    """Return groups and step of the fastest plan that fits as measured; if none does, the step of least memory."""
    answer, done = _answer(subject, device, problem, room)
    return [] if answer is None else problem.groups(answer), done


def _answer(subject: Subject, device: Device, problem: Problem, room: int) -> tuple[Answer | None, Step]:
    """Return the fastest answer that fits as measured, and its step; else None, and the lowest peak's step."""
    found = _within(subject, device, problem, room)
    if found is None:
        answer = problem.frugal()
        found = answer, step(subject, device, problem.costs.runs, problem.taken(answer), problem.whole(answer))
    for _ in range(TRIES):  # of answers that need less as measured, though not by the sum
        less = _within(subject, device, problem, found[1].peak - 1) if found[1].peak > room else None
        if less is None:
            break
        found = less
    if found[1].peak <= room:
        return found
    return None, min(found[1], problem.costs.stock, key=lambda one: one.peak)


def _within(subject: Subject, device: Device, problem: Problem, room: int) -> tuple[Answer, Step] | None:
    """Return the fastest answer of a few that fits as measured, and its step; None if none of them does."""
    stock = problem.costs.stock
    limit = room
    best: tuple[Answer, Step] | None = (problem.every(STOCK), stock) if stock.peak <= room else None
    for _ in range(TRIES):
        answer = fastest(problem.stages, limit)
        if answer is None:
            break
        done = step(subject, device, problem.costs.runs, problem.taken(answer), problem.whole(answer))
        if done.peak <= room:
            if best is None or done.work.seconds < best[1].work.seconds * (1 - WORTH):
                best = answer, done
            break
        limit = peak(problem.stages, answer) - (done.peak - room)  # less than what this answer needs by the sum
    return best


def points_of(costs: Costs, fixed: int) -> list[Point]:
    """Return the baselines, and the front of each error, by the costs of single blocks."""
    problem = Problem(costs, "exact")

    def point(name: str, answer: Answer, error: str = "exact", of: Problem = problem) -> Point:
        return Point(name, error, fixed + peak(of.stages, answer), seconds(of.stages, answer))

    points = [
        point("stock", problem.every(STOCK)),
        point(FULL.name, problem.every(FULL)),
        point(SELECTIVE.name, problem.every(SELECTIVE)),
        *(point(f"every {name} block {FULL.name}", problem.every(FULL, n)) for n, name in EVERY.items()),
    ]
    for error in ERRORS:
        points += line_of(Problem(costs, error), error, points[0].peak - fixed, fixed)
    return points


def line_of(problem: Problem, error: str, high: int, fixed: int) -> list[Point]:
    """Return the least time for a few memories up to `high`."""
    low = least(problem.stages)
    line: list[Point] = []
    for k in range(FRONT):
        answer = fastest(problem.stages, slack(low + (high - low) * k // (FRONT - 1)))
        if answer is None:
            continue
        time = seconds(problem.stages, answer)
        if not line or time < line[-1].seconds:
            line.append(Point("plan", error, fixed + peak(problem.stages, answer), time))
    return line
