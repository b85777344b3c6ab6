"""Kernels for the Hugging Face Hub: their layout, and that the library `kernels` loads them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

from fitact.base import UsageError
from fitact.codegen import bundle
from fitact.codegen.generate import generate
from tests.codegen.test_codegen import fit as made_up
from tests.codegen.test_standalone import load, passes, same, shipped
from tests.conftest import ROOT
from tests.support.commands import put, record

NAMES = ["gelu_fewbit3", "gelu_inverted1", "softplus_output"]
Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    generate(bundle.plan(map(shipped, NAMES), hub=True), folder, prune=False, layout=bundle.HUB)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_layout(name: str, hub: Path) -> None:
    kernel = name.replace("_", "-")
    module = hub / kernel / "torch-ext" / name
    found = {path.relative_to(hub / kernel).as_posix() for path in (hub / kernel).rglob("*") if path.is_file()}
    runtime = {f"torch-ext/{name}/runtime/{path}" for path in bundle.RUNTIME}
    own = {f"torch-ext/{name}/{file}.py" for file in ("__init__", "layers")}
    assert found == runtime | own | {"build.toml", "torch-ext/metadata.json"}
    for path in bundle.RUNTIME:
        assert (module / "runtime" / path).read_bytes() == (ROOT / "runtime" / path).read_bytes()
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    build = tomllib.loads((hub / kernel / "build.toml").read_text())
    metadata = json.loads((hub / kernel / "torch-ext" / "metadata.json").read_text())
    assert build["general"]["name"] == metadata["name"] == kernel
    assert build["general"]["version"] == metadata["version"] == 1
    assert build["general"]["license"] == metadata["license"] == licence
    assert build["torch-noarch"] == {}
    assert metadata["id"].isidentifier() and metadata["id"].startswith(f"{name}_")
    assert metadata["python-depends"] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_module_and_its_layer(name: str, hub: Path) -> None:
    """The layer has nothing but `forward` and what `kernels` asks for; the ops have the module's name."""
    module = load(hub / name.replace("_", "-") / "torch-ext" / name, f"standalone_{name}_0123")
    assert same(module, name)
    assert module.__name__ == module.runtime.kernels.ops.NAMESPACE
    (layer,) = (getattr(module.layers, one) for one in module.layers.__all__)
    assert layer.__name__ == module.__all__[0]
    assert layer.__init__ is nn.Module.__init__
    assert {*dir(layer)} - {*dir(nn.Module)} == {"can_torch_compile", "has_backward"}
    assert [*inspect.signature(layer.forward).parameters] == [*inspect.signature(nn.GELU.forward).parameters]
    module.of_layer = layer()
    assert all(a.equal(b) for a, b in zip(passes(module, "of_layer"), passes(module, name), strict=True))


class Dyt(nn.Module):
    """A module whose forward `kernels` replaces by that of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.full((1,), 0.7)), nn.Parameter(torch.linspace(1, 2, 6))
        self.beta = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * torch.tanh(self.alpha * x) + self.beta


def test_a_layer_uses_the_learned_numbers_of_the_module_that_it_stands_in_for(tmp_path: Path) -> None:
    generate(bundle.plan([shipped("dyt_recompute")], hub=True), tmp_path, prune=False, layout=bundle.HUB)
    module = load(tmp_path / "dyt-recompute" / "torch-ext" / "dyt_recompute", "standalone_dyt_recompute_0123")
    layer = module.layers.DytRecompute
    assert layer.__init__ is nn.Module.__init__
    assert {*dir(layer)} - {*dir(nn.Module)} == {"can_torch_compile", "has_backward"}
    dyt, x = Dyt(), torch.randn(5, 6, requires_grad=True)
    leaves = [x, *dyt.parameters()]
    expected = dyt(x)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    dyt.forward = MethodType(layer.forward, dyt)
    found = dyt(x)
    assert found.grad_fn is not None and "Run" in found.grad_fn.name()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), leaves), gradients)
    assert [*module.DytRecompute(6).state_dict()] == ["alpha", "gamma", "beta"]


LOADED = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
from kernels._rust import Build, Metadata
from kernels.layer.layer import _validate_layer

for path in map(Path, sys.argv[1:]):
    assert [str(backend) for backend in Build.open(path).general.backends] == ["cpu", "cuda", "rocm"]
    metadata = Metadata.from_bytes((path / "torch-ext" / "metadata.json").read_bytes())
    assert str(metadata.name) == path.name
    kernel = get_local_kernel(path / "torch-ext")
    assert kernel.__name__ == kernel.runtime.kernels.ops.NAMESPACE == metadata.id
    layer = getattr(kernel.layers, kernel.__all__[0])
    _validate_layer(check_cls=torch.nn.SiLU, cls=layer, repo=path)
    x = torch.randn(99, requires_grad=True)
    y = torch.compile(layer(), fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    print(metadata.name.python_name, y.shape == x.grad.shape)
assert "fitact" not in sys.modules
"""


def test_kernels_loads_them(hub: Path) -> None:
    """Validated and loaded by the library, in a process of its own."""
    pytest.importorskip("kernels", reason="pip install kernels, 0.17 or later, to load what --hub writes")
    paths = [hub / name.replace("_", "-") for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *paths], capture_output=True, text=True, check=False, cwd=hub
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "".join(f"{name} True\n" for name in NAMES)


@pytest.mark.parametrize("name", ["gelu", "MyAct_2", "a__b", "A1", "x" * 80])
def test_names(name: str) -> None:
    kernel = name.lower().replace("_", "-")
    files = bundle.plan([made_up("tanh", name)], hub=True)
    assert all(path.startswith(f"{kernel}/") for path in files)
    assert f"{kernel}/torch-ext/{kernel.replace('-', '_')}/__init__.py" in files


@pytest.mark.parametrize("name", ["f", "gelu_", "Class", "X"])
def test_names_that_no_kernel_has(name: str, command: Command) -> None:
    put("odd.json", record(name))
    status, out, err = command("codegen odd.json --hub")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fitact: name: '{name}' would be the kernel '{name.lower().replace('_', '-')}', but a")
    assert command("codegen odd.json --standalone")[0] == 0


@pytest.mark.parametrize(
    ("names", "hub", "told"),
    [
        (["layers"], True, "the folder of 'layers' uses that name itself"),
        (["runtime"], False, "the folder of 'runtime' uses that name itself; make the fit again"),
        (["my_act", "My_Act"], True, "two fits are called 'my-act'; make one again"),
    ],
)
def test_names_that_the_folder_uses_or_that_meet(names: list[str], hub: bool, told: str) -> None:
    bundle.plan([made_up("tanh", "layers")])
    with pytest.raises(UsageError, match=told):
        bundle.plan([made_up("tanh", name) for name in names], hub=hub)
