"""Kernels for the Hugging Face Hub: their layout, and that the library `kernels` loads them."""

import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fitact.codegen import bundle, generate
from tests.codegen.test_standalone import passes, same, shipped
from tests.conftest import ROOT, Command
from tests.support.built import built
from tests.support.commands import put, record
from tests.support.generated import made_up
from tests.support.package import load
from tests.support.processes import python
from tests.support.refusals import refused

NAMES = ["gelu_fewbit3", "gelu_inverted1", "softplus_output"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    fits = map(shipped, [*NAMES, "swiglu_recompute", "dyt_recompute"])
    generate(bundle.plan(fits, hub=True), folder, prune=False, layout=bundle.HUB)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_layout(name: str, hub: Path) -> None:
    kernel = hub / name.replace("_", "-")
    actual = {path.relative_to(kernel).as_posix() for path in kernel.rglob("*") if path.is_file()}
    parts = {"__init__.py", "layers.py", *(f"runtime/{path}" for path in bundle.RUNTIME)}
    assert actual == {*(f"torch-ext/{name}/{part}" for part in parts), "build.toml", "torch-ext/metadata.json"}
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    build = tomllib.loads((kernel / "build.toml").read_text())
    metadata = json.loads((kernel / "torch-ext" / "metadata.json").read_text())
    for stated in (build["general"], metadata):
        assert (stated["name"], stated["version"], stated["license"]) == (kernel.name, 1, licence)
    assert build["torch-noarch"] == {} and metadata["python-depends"] == []
    assert metadata["id"].isidentifier() and metadata["id"].startswith(f"{name}_")


def loaded(name: str, hub: Path) -> tuple[Any, Any]:
    """Return a module and its layer, which has nothing but `forward` and what `kernels` asks for."""
    module = load(hub / name.replace("_", "-") / "torch-ext" / name, f"standalone_{name}_0123")
    (layer,) = (getattr(module.layers, each) for each in module.layers.__all__)
    assert {*dir(layer)} - {*dir(nn.Module)} == {"can_torch_compile", "has_backward"}
    return module, layer


@pytest.mark.parametrize("name", NAMES)
def test_the_module_and_its_layer(name: str, hub: Path) -> None:
    module, layer = loaded(name, hub)
    assert same(module, name) and module.__name__ == module.runtime.kernels.ops.NAMESPACE
    assert layer.__name__ == module.__all__[0] and layer.__init__ is nn.Module.__init__
    assert [*inspect.signature(layer.forward).parameters] == [*inspect.signature(nn.GELU.forward).parameters]
    module.of_layer = layer()
    assert all(a.equal(b) for a, b in zip(passes(module, "of_layer"), passes(module, name), strict=True))


DYT = {"alpha": 1, "gamma": 8, "beta": 8}  # its parameters, and their sizes
STANDS_IN: dict[str, Callable[[], nn.Module]] = {
    "dyt_recompute": lambda: built(
        lambda own, x: own.gamma * torch.tanh(own.alpha * x) + own.beta,
        **{key: nn.Parameter(torch.linspace(0.7, 2, size)) for key, size in DYT.items()},
    ),
    "swiglu_recompute": lambda: built(
        lambda own, x: own.down_proj(F.silu(own.gate_proj(x)) * own.up_proj(x)),
        config=SimpleNamespace(hidden_act="silu"),
        **{f"{key}_proj": nn.Linear(8, 8) for key in ("gate", "up", "down")},
    ),
}


@pytest.mark.parametrize("name", STANDS_IN)
def test_a_layer_stands_in_for_a_module_and_uses_its_parameters(name: str, hub: Path) -> None:
    module, layer = loaded(name, hub)
    own, x = STANDS_IN[name](), torch.randn(5, 8, requires_grad=True)
    expected, actual = own(x), MethodType(layer.forward, own)(x)
    torch.testing.assert_close(actual, expected)
    leaves = [x, *own.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)))
    if name == "dyt_recompute":
        assert "KernelFunction" in actual.grad_fn.name()
        assert [*module.DytRecompute(6).state_dict()] == [*DYT]
    else:
        own.config.hidden_act = "gelu"
        with pytest.raises(ValueError, match="hidden_act: expected silu or swish, got 'gelu'"):
            layer.forward(own, x)


KERNELIZED = """
import copy, sys
from pathlib import Path
import torch
from kernels import (
    LocalLayerRepository, Mode, get_local_kernel, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
)
from kernels._rust import Build, Metadata
from transformers.activations import GELUActivation
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from fitact.runtime.measure import count_saved

replace_kernel_forward_from_hub(GELUActivation, "GeLU")  # as transformers itself does with a kernels that it knows
replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=64))
activated = torch.nn.Sequential(torch.nn.Linear(32, 64), GELUActivation())
x = torch.randn(99, 32)
for model, layer, name, kernel, most in (
    (mlp, "SwiGLUMLP", "SwigluRecompute", "swiglu-recompute", 1e-6),
    (activated, "GeLU", "GeluFewbit3", "gelu-fewbit3", 0.2),
):
    folder, other = Path(sys.argv[1]) / kernel, copy.deepcopy(model)
    assert [str(backend) for backend in Build.open(folder).general.backends] == ["cpu", "cuda", "rocm"]
    metadata = Metadata.from_bytes((folder / "torch-ext" / "metadata.json").read_bytes())
    loaded = get_local_kernel(folder / "torch-ext")
    assert loaded.__name__ == loaded.runtime.kernels.ops.NAMESPACE == metadata.id and str(metadata.name) == kernel
    repository = LocalLayerRepository(folder / "torch-ext", layer_name=name)
    with use_kernel_mapping({layer: {"cpu": {Mode.TRAINING: repository}}}, inherit_mapping=False):
        kernelize(other, mode=Mode.TRAINING, use_fallback=False)
    torch.compile(other, fullgraph=True, backend="aot_eager")(x)
    found = []
    for each in (model, other):
        with count_saved(each) as saved:
            y = each(x)
        y.square().sum().backward()
        found.append((y, saved.bytes, torch.cat([one.grad.flatten() for one in each.parameters()])))
    (expected, size, whole), (y, fewer, gradient) = found
    assert y.equal(expected) and fewer < size, (name, fewer, size)
    assert (gradient - whole).norm() < most * whole.norm(), name
"""


def test_kernels_loads_them_for_modules_of_transformers(hub: Path) -> None:
    """GELU and the MLP of LLaMA, also compiled: the same values, fewer bytes saved."""
    pytest.importorskip("kernels", reason="pip install kernels, 0.17 or later, to load what --hub writes")
    pytest.importorskip("transformers")
    python(KERNELIZED, hub, folder=hub, warnings="ignore")


@pytest.mark.parametrize("name", ["gelu", "MyAct_2", "a__b", "A1", "x" * 80])
def test_names(name: str) -> None:
    kernel, files = name.lower().replace("_", "-"), bundle.plan([made_up("tanh", name)], hub=True)
    assert f"{kernel}/torch-ext/{name.lower()}/__init__.py" in files
    assert {path.partition("/")[0] for path in files} == {kernel}


@pytest.mark.parametrize("name", ["f", "gelu_", "Class", "X"])
def test_names_that_no_kernel_has(name: str, command: Command) -> None:
    put("odd.json", record(name))
    status, out, err = command("codegen odd.json --hub")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fitact: name: '{name}' would be the kernel '{name.lower().replace('_', '-')}', but a")
    assert command("codegen odd.json --standalone")[0] == 0


def test_names_that_the_folder_uses_or_that_meet() -> None:
    layers, runtime, *both = (made_up("tanh", name) for name in ("layers", "runtime", "my_act", "My_Act"))
    bundle.plan([layers])
    assert "the folder of 'layers' uses that name itself" in refused(bundle.plan, [layers], hub=True)
    assert "the folder of 'runtime' uses that name itself; make the fit again" in refused(bundle.plan, [runtime])
    assert "two fits are called 'my-act'; make one again" in refused(bundle.plan, both, hub=True)
