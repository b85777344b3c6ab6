"""What a logarithm, a root, an inverse or a quotient reads of a sigmoid is no code, which may be 0."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fitact
from fitact.runtime.measure import count_saved
from tests.support.blocks import Of

STEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda x: torch.log(torch.sigmoid(x)),
    "of a part": lambda x: (lambda s: torch.cat([torch.log(s[:, :128]), s[:, 128:]], 1))(torch.sigmoid(x)),
    "and a product": lambda x: (lambda s: (s * x) * torch.log(s))(torch.sigmoid(x)),
    "in place": lambda x: torch.sigmoid(x).add(0).sqrt_(),
    "sqrt": lambda x: torch.sqrt(torch.sigmoid(x)),
    "rsqrt": lambda x: torch.rsqrt(torch.sigmoid(x)),
    "inverse": lambda x: 1 / torch.sigmoid(x),
    "inverse as a power": lambda x: (x * x + 0.5) ** -1,
    "power": lambda x: torch.sigmoid(x) ** 0.3,
    "quotient": lambda x: torch.tanh(x) / (torch.sigmoid(x) + 0.01),
    "two": lambda x: torch.log(torch.sigmoid(x) + 1e-8) + torch.log(1 - torch.sigmoid(x) + 1e-8),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("error", "most"), [("rounding", 0.03), ("coarse", 0.14)])
@pytest.mark.parametrize("name", STEEP)
def test_gradients(name: str, error: str, most: float, outside: bool) -> None:
    """Of a residual layer with large numbers before its activation."""
    up, x = nn.Linear(64, 256), torch.randn(256, 64)
    up.weight.data.mul_(6)
    model = Of(lambda m, x: x + m.down(STEEP[name](m.up(x))), up=up, down=nn.Linear(256, 64))
    gradients, sizes = [], []
    for context in (nullcontext(), fitact.saving(error)):
        hooks = saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)
        with count_saved(model) as saved, hooks if outside else nullcontext(), context:
            y = model(x)
        sizes.append(saved.bytes)
        found = [torch.autograd.grad(y.square().sum(), [*model.parameters()], retain_graph=True) for _ in range(2)]
        once, again = (torch.cat([one.flatten() for one in each]) for each in found)
        assert torch.equal(once, again)
        gradients.append(once)
    expected, gradient = gradients
    assert expected.isfinite().all()
    assert (gradient - expected).norm() <= most * expected.norm()
    assert outside or sizes[1] < sizes[0]
