"""Each test compiles anew."""

from collections.abc import Iterator

import pytest
import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
