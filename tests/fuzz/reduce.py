"""Failures are reduced to the smallest formula that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .grammar import Tree, X

SIMPLEST = (X, Tree("1"))


def reduced(tree: Tree, fails: Callable[[Tree], bool], most: int = 200) -> Tree:
    """Return a small formula that fails, as the given one does, after at most that many trials.

    A subtree is replaced by one of its parts, by x or by 1, the largest first, until no such formula fails.
    """
    trials = 0
    while True:
        for smaller in _smaller(tree):
            trials += 1
            if trials > most:
                return tree
            if fails(smaller):
                tree = smaller
                break
        else:
            return tree


def _smaller(tree: Tree) -> Iterator[Tree]:
    """Yield smaller formulas, the smallest first."""
    candidates = {
        str(smaller): smaller
        for way, node in tree.nodes()
        if node.parts or node.form not in ("x", "1")
        for new in (*node.parts, *SIMPLEST)
        if (smaller := tree.replaced(way, new)).size < tree.size
        or (node.form not in ("x", "1") and not node.parts)
    }
    yield from sorted(candidates.values(), key=lambda one: one.size)
