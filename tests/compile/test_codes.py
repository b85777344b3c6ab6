"""The code for numbers of any kind: how near it is to the best table, and to numbers of any scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from fitact.runtime.compile.compander import Compander


def test_nearly_the_best_table() -> None:
    """Its objective for Student's t beside the least that 256 numbers have, found by a dynamic programme."""
    edges = np.sinh(np.linspace(-np.arcsinh(256), np.arcsinh(256), 400_001)) / 4
    x = (edges[1:] + edges[:-1]) / 2
    weight = student.pdf(x, 3) * np.diff(edges)
    weight /= weight.sum()
    miss = (x - Compander(8).rounded(torch.from_numpy(x)).numpy()) ** 2
    objective = (weight * miss / (x * x + (weight * x * x).sum())).sum()
    assert 1.03 < objective / 2.420280511e-05 < 1.04


@pytest.mark.parametrize("deviation", [0.84, 1.0, 1.68])
def test_error_of_scaled_rows(deviation: float) -> None:
    x = deviation * torch.randn(200_000, dtype=torch.float64)
    off = (Compander(8).rounded(x) - x).norm() / x.norm()
    assert 0.008 < off < 0.01
