"""Shipped activations on the PyTorch path: values, gradients, layouts, transforms, and what is kept."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.runtime import eager, registry
from fitact.runtime.memory import count_saved

from .steps import DTYPES, HALVES, KINDS, Shipped, around, each, patterns, shipped

GELU3 = next(one for one in shipped() if one.name == "gelu_fewbit3")
gelu_fewbit3 = GELU3.function


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit but for the payload of NaNs."""
    return a.dtype == b.dtype and bool(torch.all((a == b) | (a.isnan() & b.isnan())))


def run(one: Shipped, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of a fresh leaf with the layout of x."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = one.function(leaf)
    y.backward(torch.ones_like(y) if dy is None else dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@each()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_pattern(one: Shipped, dtype: torch.dtype) -> None:
    x = patterns(dtype)
    dy = torch.randn(x.shape).to(dtype)
    y, dx = run(one, x, dy)
    assert equal(y, one.stock(x))
    assert equal(dx, one.gradient(x, dy))
    if one.piecewise_linear:
        number = ~x.isnan()
        assert equal(dx[number], one.stock_gradient(x, dy)[number])


@each()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_and_beside_every_border(one: Shipped, dtype: torch.dtype) -> None:
    x = around(one.fit["borders"], dtype).to(dtype)
    y, dx = run(one, x)
    assert equal(y, one.stock(x))
    assert equal(dx, one.slope(x).to(dtype))
    if one.piecewise_linear and dtype != torch.float64:  # a level such as 0.01 is a float32
        number = ~x.isnan()
        assert equal(dx[number], one.stock_gradient(x, torch.ones_like(x))[number])


@each()
def test_nan_has_the_first_level(one: Shipped) -> None:
    y, dx = run(one, torch.tensor([float("nan")]))
    assert y.isnan().all()
    assert dx.item() == one.fit["levels"][0]


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 50, 70),
    "transposed": lambda: torch.randn(50, 70).t(),
    "channels_last": lambda: torch.randn(2, 5, 30, 40).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 5, 6, 7, 8).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "size_one_dims": lambda: torch.randn(3, 1, 5, 1).transpose(0, 2),
    "expanded": lambda: torch.randn(30, 1).expand(30, 50),
    "sliced": lambda: torch.randn(100, 40)[::3, 1::2],
    "overlapping": lambda: torch.randn(100).as_strided((20, 20), (2, 1)),
    "empty": lambda: torch.randn(0, 3),
    "zero_dim": lambda: torch.randn(()),
    "one_tile": lambda: torch.randn(8192),
    "many_chunks": lambda: torch.randn(8192 * 70 + 5),
}
DENSE = set(LAYOUTS) - {"expanded", "sliced", "overlapping"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout]().to(dtype)
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    y = gelu_fewbit3(leaf)
    stock = F.gelu(x)
    assert y.shape == x.shape
    if layout in DENSE:
        assert equal(y, stock)
        assert y.stride() == stock.stride()
    else:
        torch.testing.assert_close(y, stock)
    dy = torch.randn(x.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert equal(dx, GELU3.gradient(x, dy))


@pytest.mark.parametrize(
    "shape_gradient",
    [
        lambda y: torch.randn(1, dtype=y.dtype).expand_as(y),
        lambda y: torch.randn(y.shape[::-1], dtype=y.dtype).permute(*reversed(range(y.dim()))),
        lambda y: torch.randn(*y.shape, 2, dtype=y.dtype)[..., 0],
    ],
    ids=["expanded", "other order", "strided"],
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_gradients_of_any_layout(layout: str, shape_gradient) -> None:
    x = LAYOUTS[layout]().requires_grad_()
    y = gelu_fewbit3(x)
    dy = shape_gradient(y.detach())
    (dx,) = torch.autograd.grad(y, x, dy)
    assert equal(dx, GELU3.gradient(x, dy))


def test_dtypes_and_objects_refused() -> None:
    for wrong in (
        torch.arange(3),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bool),
        1.0,
    ):
        with pytest.raises(TypeError, match=r"gelu_fewbit3: expected a tensor of float16.*, got "):
            gelu_fewbit3(wrong)


def test_without_gradient_nothing_is_coded() -> None:
    with torch.no_grad():
        y = gelu_fewbit3(torch.randn(100, requires_grad=True))
    assert not y.requires_grad
    frozen = gelu_fewbit3(torch.randn(100))
    assert not frozen.requires_grad
    with torch.inference_mode():
        assert equal(gelu_fewbit3(x := torch.randn(10)), F.gelu(x))


@each()
@pytest.mark.parametrize("n", [1, 8191, 8192, 8193, 100_000])
def test_exactly_k_bits_are_kept(one: Shipped, n: int) -> None:
    x = torch.randn(n, requires_grad=True)
    with count_saved() as saved:
        one.function(x)
    tiles = -(-n // 8192)
    assert saved.bytes == tiles * 8192 * one.fit["bits"] // 8


def mlp(activation: nn.Module) -> nn.Sequential:
    half = torch.bfloat16
    return nn.Sequential(nn.Linear(1024, 4096, dtype=half), activation, nn.Linear(4096, 1024, dtype=half))


@pytest.mark.parametrize(
    ("activation", "kept"),
    [(nn.ReLU(), 83_886_080), (nn.GELU(), 150_994_944), (fitact.activation("gelu", bits=3), 96_468_992)],
    ids=["relu", "gelu", "gelu_fewbit3"],
)
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_kept_by_the_mlp(activation: nn.Module, kept: int, fake: bool) -> None:
    """1024 → 4096 → 1024, input (2, 4096, 1024) in bfloat16."""
    if fake:
        with FakeTensorMode():
            model, x = mlp(copy.deepcopy(activation)), torch.randn(2, 4096, 1024, dtype=torch.bfloat16)
            with count_saved(model) as saved:
                model(x)
    else:
        model, x = mlp(activation), torch.randn(2, 4096, 1024, dtype=torch.bfloat16)
        with count_saved(model) as saved:
            model(x)
    assert saved.bytes == kept


@each(KINDS)
def test_compile_fullgraph(one: Shipped) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(one.function, fullgraph=True, backend="aot_eager")
    x = torch.randn(300, 50, requires_grad=True)
    with count_saved() as saved:
        y = compiled(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert equal(y, one.stock(x))
    assert equal(dx, one.gradient(x, dy))
    assert saved.bytes == 2 * 1024 * one.fit["bits"]


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_compiled_model_keeps_codes(budget: float) -> None:
    """Inductor, between two pointwise operations that it would like to fuse and recompute."""
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return gelu_fewbit3(x * 2).sin() + 1

    x = torch.randn(64, 1024, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget), count_saved() as saved:
        y = torch.compile(f, fullgraph=True)(x)
    torch.testing.assert_close(y, f(x))
    y.sum().backward()
    reference = x.detach().clone().requires_grad_()
    f(reference).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)
    sizes = {storage.nbytes() for storage in saved.storages.values()}
    if budget == 1.0:
        assert 64 * 1024 * 3 // 8 in sizes  # the codes
        assert len(sizes) == 2  # and sin's input


def test_compile_dynamic_recompiles_once() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gelu_fewbit3, fullgraph=True, backend=counter)
    for n in (100, 8192, 9000, 20_001, 7):
        x = torch.randn(n, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert equal(x.grad, GELU3.slope(x).float())
    assert counter.frame_count <= 2


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_compile_other_layouts_with_dynamic_sizes(layout: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(gelu_fewbit3, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (8, 9, 30):
        x = torch.randn(2, n, 4, 5)
        x = x.transpose(1, 2) if layout == "transposed" else x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        y = compiled(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, F.gelu(x))
        assert equal(dx, GELU3.gradient(x, dy))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_can_be_changed_in_place(layout: str) -> None:
    x = LAYOUTS[layout]().requires_grad_()
    y = gelu_fewbit3(x).mul_(2)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert equal(dx, 2 * GELU3.slope(x).float())


def test_vmap_of_nothing() -> None:
    assert torch.func.vmap(gelu_fewbit3)(torch.randn(0, 7)).shape == (0, 7)
    assert torch.func.vmap(gelu_fewbit3)(torch.randn(7, 0)).shape == (7, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 64), fitact.activation("gelu"), nn.Linear(64, 16))
    x = torch.randn(32, 16)
    seen = []
    model[1].register_forward_hook(lambda _, args, y: seen.append((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype=dtype):
        y = model(x)
        y.float().sum().backward()
    assert seen == [(dtype, dtype)]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@each()
def test_autocast_keeps_the_dtype_of_the_input(one: Shipped) -> None:
    """Also where PyTorch's own operator is on autocast's float32 list."""
    x = torch.randn(100, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = one.function(x)
    assert y.dtype == torch.bfloat16
    assert equal(y, one.stock(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    x = torch.randn(5000, requires_grad=True)
    checkpoint(lambda t: gelu_fewbit3(t * 2).sum(), x, use_reentrant=reentrant).backward()
    assert equal(x.grad, 2 * GELU3.slope(2 * x).float())


def test_selective_checkpoint_can_keep_the_codes() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def keep(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
        ours = op == torch.ops.fitact.forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(5000, requires_grad=True)
    y = checkpoint(
        lambda t: gelu_fewbit3(t.sin()).cos(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep),
    )
    y.sum().backward()
    reference = x.detach().requires_grad_()
    gelu_fewbit3(reference.sin()).cos().sum().backward()
    assert equal(x.grad, reference.grad)


def test_save_on_cpu() -> None:
    x = torch.randn(9000, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = gelu_fewbit3(x)
    y.sum().backward()
    assert equal(x.grad, GELU3.slope(x).float())


def test_torch_func() -> None:
    x = torch.randn(5, 70)
    slopes = GELU3.slope(x).float()
    grad = torch.func.grad(lambda t: gelu_fewbit3(t).sum())
    assert equal(grad(x), slopes)
    assert equal(torch.func.vmap(grad)(x), slopes)
    assert equal(torch.func.vmap(grad, in_dims=1)(x), slopes.t())
    assert equal(torch.func.vmap(torch.func.vmap(grad))(x), slopes)
    assert equal(torch.func.vmap(gelu_fewbit3)(x), F.gelu(x))
    assert equal(torch.func.jacrev(gelu_fewbit3)(x[0]), torch.diag(slopes[0]))
    assert equal(torch.func.vmap(torch.func.jacrev(gelu_fewbit3))(x), torch.diag_embed(slopes))
    y, pullback = torch.func.vjp(gelu_fewbit3, x)
    assert equal(pullback(torch.ones_like(y))[0], slopes)


def test_vmap_of_many_tiles() -> None:
    x = torch.randn(3, 8192 * 2 + 77)
    grad = torch.func.vmap(torch.func.grad(lambda t: (gelu_fewbit3(t) ** 2).sum()))(x)
    torch.testing.assert_close(grad, 2 * F.gelu(x) * GELU3.slope(x).float())


def test_per_sample_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 30), fitact.activation("gelu"), nn.Linear(30, 1))
    parameters = dict(model.named_parameters())
    x = torch.randn(6, 4)

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (sample,)).sum()

    each_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(6):
        alone = torch.func.grad(loss)(parameters, x[i])
        for name in parameters:
            torch.testing.assert_close(each_sample[name][i], alone[name])


@pytest.mark.parametrize(
    "twice",
    [
        lambda x: torch.autograd.grad(gelu_fewbit3(x).sum(), x, create_graph=True)[0].sum().backward(),
        lambda x: torch.autograd.grad(
            torch.autograd.grad(gelu_fewbit3(x).pow(2).sum(), x, create_graph=True)[0].sum(), x
        ),
        lambda x: torch.func.grad(torch.func.grad(lambda t: gelu_fewbit3(t).sum()))(x[0]),
        lambda x: torch.func.jacrev(torch.func.jacrev(gelu_fewbit3))(x),
    ],
    ids=["backward", "grad", "func.grad", "jacrev"],
)
def test_double_backward_raises(twice) -> None:
    with pytest.raises(RuntimeError, match="gelu_fewbit3: a second derivative was asked for"):
        twice(torch.randn(3, requires_grad=True))


def test_forward_mode_raises() -> None:
    x = torch.randn(3)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(gelu_fewbit3, (x,), (x,))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (8192,), (4, 2500)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, key = torch.randn(shape).to(dtype), GELU3.module.KEY
    dims = tuple(reversed(range(x.dim())))
    for order in ((), dims):
        torch.library.opcheck(torch.ops.fitact.forward.default, (x, order, x.dtype, key))
    y, codes = torch.ops.fitact.forward(x, (), x.dtype, key)
    torch.library.opcheck(torch.ops.fitact.backward.default, (torch.ones_like(y), None, codes, x.dtype, key))


def test_export() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gelu_fewbit3(x) + 1

    x = torch.randn(3, 4)
    assert equal(torch.export.export(Model(), (x,)).module()(x), F.gelu(x) + 1)


def test_module_copies_and_pickles() -> None:
    module = fitact.activation("gelu", bits=3)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert equal(twin(x := torch.randn(5)), F.gelu(x))
    assert not module.state_dict()


def test_unregistered_key() -> None:
    with pytest.raises(RuntimeError, match="import the generated module"):
        registry.find("nothing-0")


def test_shipped_activation_that_is_not_there() -> None:
    with pytest.raises(fitact.UsageError, match=r"gelu_fewbit7.*there are .*gelu_fewbit3"):
        fitact.activation("gelu", bits=7)


def test_codes_are_the_layout_that_is_documented() -> None:
    """Row r of column j in bits [k·r, k·r + k) of an 8k-bit word, stored as k planes of 1024 bytes."""
    x = torch.randn(10_000)
    x[5] = float("nan")
    _, codes = torch.ops.fitact.forward(x, (), x.dtype, GELU3.module.KEY)
    assert codes.dtype == torch.uint8
    planes = codes.view(2, 3, 1024)
    expected = torch.zeros(2 * 8192, dtype=torch.long)
    expected[:10_000] = sum((x > border).long() for border in GELU3.fit["borders"])
    words = sum(planes[:, plane].long() << (8 * plane) for plane in range(3))
    for row in range(8):
        assert torch.equal(words >> (3 * row) & 7, expected.view(2, 8, 1024)[:, row])


def test_trains_like_the_exact_one() -> None:
    """A regression that the exact activation learns is learned as well."""

    def losses(activation: nn.Module) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 64), activation, nn.Linear(64, 1))
        x = torch.rand(256, 2) * 4 - 2
        target = (x[:, :1] * x[:, 1:]).sin()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        found = []
        for _ in range(200):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    exact, fewbit = losses(nn.GELU()), losses(fitact.activation("gelu", bits=3))
    assert exact[0] == fewbit[0]  # the same values forward
    assert exact[-1] < exact[0] / 5
    assert fewbit[-1] < exact[0] / 5


IMPORT = """
import sys
import fitact.generated.gelu_fewbit3
heavy = {"scipy", "sympy", "jinja2", "matplotlib", "fitact.fitter", "fitact.codegen"} & set(sys.modules)
assert not heavy, heavy
"""

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from fitact.generated.gelu_fewbit3 import gelu_fewbit3
from fitact.runtime.language import HAS_TRITON
assert not HAS_TRITON
x = torch.randn(10, requires_grad=True)
gelu_fewbit3(x).sum().backward()
assert x.grad is not None and torch.equal(gelu_fewbit3(x), torch.nn.functional.gelu(x))
"""


@pytest.mark.parametrize("script", [IMPORT, WITHOUT_TRITON], ids=["imports little", "without triton"])
def test_in_a_process_of_its_own(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_registering_twice_is_harmless() -> None:
    step = registry.find(GELU3.module.KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.register(step) == step.key
    assert eager.TILE == 8192
