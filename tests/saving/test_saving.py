"""The context: gradients are PyTorch's bit for bit in every situation of the tests of rebuilding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact import saving
from fitact.errors import UsageError
from fitact.runtime.memory.peak import peak_memory
from tests.rebuild.test_rebuild import (
    AROUND,
    HALF,
    MODELS,
    READS,
    SETTINGS,
    SHAPES,
    Own,
    Read,
    Step,
    X,
    cast,
    differences,
    kept,
    kept_of,
    loss_of,
    observed,
    train,
)
from tests.rebuild.test_rebuild_models import SCRIPT, inputs_of, made, run
from tests.support.models import model_of


def pair(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model as it is, and one whose forward runs in the context."""
    torch.manual_seed(0)
    baseline = make().to(dtype).train()
    model = copy.deepcopy(baseline)
    kind = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with saving():
            return kind.forward(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return baseline, model


def agree(make: Callable[[], Any], step: Step = train, x: Tensor = X, dtype: torch.dtype = torch.float32) -> None:
    expected, found = (observed(one, step, x.to(dtype)) for one in pair(make, dtype))
    if not isinstance(expected, str):
        assert not differences(expected, found)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_bytes(name: str, setting: str) -> None:
    dtype, autocast, _ = SETTINGS[setting]
    baseline, model = pair(MODELS[name], dtype)
    for seed in range(2):  # the second gradient is added to the first
        with cast(autocast):
            expected, found = (observed(one, train, X.to(dtype), seed) for one in (baseline, model))
        assert not isinstance(expected, str)
        assert not differences(expected, found)
    wide = torch.randn(64, 16, 16).to(dtype)
    with cast(autocast):
        assert kept(model, wide) < kept(baseline, wide)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    for name in ("mlp", "qkv", "gate last"):
        for dtype in (torch.float32, HALF):
            agree(MODELS[name], x=SHAPES[shape], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("reads", READS)
def test_readers(reads: str, dtype: torch.dtype) -> None:
    for act in (nn.GELU, Own):
        agree(lambda act=act: Read(READS[reads], act=act), dtype=dtype)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["dropout", "composed", "adapters", "gate", "block"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_surroundings(name: str, around: str) -> None:
    agree(MODELS[name], AROUND[around])


# Shares of the baseline's bytes, a little above what was measured: in bfloat16, and under autocast.
SHARES = {
    "bert": (0.45, 0.38),
    "gpt2": (0.42, 0.37),
    "llama": (0.51, 0.40),
    "llama lora, dropout": (0.50, 0.43),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SHARES)
def test_models(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = made(name, torch.float32 if autocast else HALF)
    inputs = inputs_of(name, torch.float32 if autocast else HALF)
    found = []
    for context in (cast(None), saving()):
        model.zero_grad()
        torch.manual_seed(1)
        with cast(HALF if autocast else None), context:
            loss = model(**inputs).loss
        loss.backward()
        found.append((loss.detach(), {key: one.grad for key, one in model.named_parameters()}))
    assert not differences(*found)

    def run(context: Any) -> Any:
        with cast(HALF if autocast else None), context:
            return model(**inputs).loss

    before, after = (kept_of(model, lambda context=context: run(context)) for context in (cast(None), saving()))
    assert after < SHARES[name][autocast] * before


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_peak(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(name, dtype, size=16)
    peaks = []
    for context in (cast(None), saving()):
        model = made(name, dtype)

        def step(model: Any = model, context: Any = context) -> None:
            with context:
                loss = model(**inputs).loss
            loss.backward()

        peaks.append(peak_memory(step, model)["total"])
    assert peaks[1] < peaks[0]


def test_processes(tmp_path: Path) -> None:
    """DDP and FSDP2, by block, in half precision, and by layer: each process has the baseline's gradients."""
    script = SCRIPT.replace("fitact.rebuild(model)", "pass").replace(
        "        model(x).float()",
        "        with saving() if rebuilt else nullcontext():\n            y = model(x)\n        y.float()",
    )
    script = script.replace("import fitact\n", "from contextlib import nullcontext\nfrom fitact import saving\n")
    run(script, tmp_path, "ddp", "blocks", "half", "parts")


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled() -> None:
    """Compiled functions go inside; the context in one breaks its graph."""
    model = MODELS["mlp"]()
    compiled = torch.compile(model, backend="aot_eager")

    def inside(x: Tensor) -> Tensor:
        with saving():
            y: Tensor = compiled(x)
        return y

    def within(x: Tensor) -> Tensor:
        with saving():
            y: Tensor = model(x)
        return y

    steps = [inside, torch.compile(within, backend="aot_eager")]
    expected = observed(model, lambda model, x: train(model, x), X)
    for call in steps:
        model.zero_grad()
        assert not differences(
            expected, observed(model, lambda _, x, call=call: train(model, x, lambda _, x: call(x)), X)
        )
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="saving is for eager code"):
        torch.compile(within, backend="aot_eager", fullgraph=True)(X)


def test_compiled_alone() -> None:
    """The compiler leaves an activation of PyTorch as it is, and finds nothing else to compile around it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    stock, rebuilt = pair(MODELS["gate"])
    for model, context in (stock, nullcontext()), (stock, saving()), (rebuilt, nullcontext()):
        model.inner.zap.compile(backend=backend)
        with context:
            train(model, X.clone().requires_grad_())
    assert not graphs


def test_second_derivatives() -> None:
    found = []
    for model in pair(MODELS["block"]):
        model.eval()
        x = X.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        dx.square().sum().backward()
        found.append([x.grad, *(one.grad for one in model.parameters())])
    assert not differences(*found)


def test_a_changed_tensor_raises_as_in_pytorch() -> None:
    """Of what is stored, and of what is recomputed."""
    layer = nn.Linear(16, 16)
    for change in ("input", "output"):
        x = torch.randn(4, 16, requires_grad=True)
        with saving():
            hidden = x * 2
            y = F.gelu(hidden)
            z = layer(y)
        with torch.no_grad():
            {"input": hidden, "output": y}[change].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_change_that_pytorch_allows() -> None:
    """Scores in half precision are stored in place of their softmax in float32, and then changed."""
    found = []
    for context in (cast(None), saving()):
        x = torch.linspace(-1, 1, 640).view(10, 64).to(HALF).requires_grad_()
        with context:
            scores = x * 3
            weights = F.softmax(scores, -1, dtype=torch.float32)
            scores.add_(1)
        weights.square().sum().backward()
        found.append(x.grad)
    assert not differences(*found)


def test_attributes_changed_between_the_passes() -> None:
    found = []
    for model in pair(lambda: nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.1), nn.Linear(16, 16))):
        y = model(X)
        model[1].negative_slope = 0.5
        loss_of(y).backward()
        found.append([one.grad for one in model.parameters()])
    assert not differences(*found)


def test_two_steps_in_one_autocast() -> None:
    found = []
    for model in pair(MODELS["mlp"]):
        with torch.autocast("cpu", HALF):
            for _ in range(2):
                loss_of(model(X)).backward()
                with torch.no_grad():
                    for one in model.parameters():
                        one -= 0.01 * one.grad
        found.append([one.grad for one in model.parameters()])
    assert not differences(*found)


def test_nothing_is_held_when_the_graph_is_gone() -> None:
    """An output that lives on holds nothing of what it could be recomputed from."""
    import weakref

    x = torch.randn(64, 16, requires_grad=True)
    with saving():
        hidden = x * 2
        y = F.gelu(hidden)
    gone = weakref.ref(hidden)
    loss = y.sum()
    del hidden
    loss.backward()
    del loss
    y = y.detach()
    assert gone() is None


def test_nested_and_as_a_decorator() -> None:
    model = MODELS["mlp"]()
    x = torch.randn(64, 16, 16)
    once = kept_of(model, lambda: saving()(model)(x))
    with saving():
        inside = kept_of(model, lambda: model(x))
        with saving():
            pass
    assert once < kept(model, x)
    assert inside >= once  # other hooks win inside


def test_an_exception_leaves_nothing_behind() -> None:
    model = MODELS["mlp"]()
    x = torch.randn(64, 16, 16)
    before = kept(model, x)
    with pytest.raises(ZeroDivisionError), saving():
        model(x).fill_(1 / 0)
    assert kept(model, x) == before


def test_unknown_error() -> None:
    with pytest.raises(UsageError, match="error: expected 'exact', 'rounding' or 'coarse', got 'none'"):
        saving("none")


def test_images() -> None:
    """Norms of batches, and activations in place."""
    found = []
    for context in (cast(None), saving()):
        model = model_of("mobilenetv3_small_050").train()
        torch.manual_seed(0)
        with context:
            y = model(torch.randn(4, 3, 32, 32))
        y.square().sum().backward()
        found.append([y.detach(), *(one.grad for one in model.parameters()), *model.buffers()])
    assert not differences(*found)
