"""Exported programs: outputs and gradients are eager's, saved and loaded again, and compiled ahead of time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fitact
from fitact.generated import xielu_recompute
from fitact.runtime import shipped
from fitact.runtime.kernels import registry
from fitact.runtime.norms import MSLayerNorm, MSRMSNorm
from tests.support.built import built
from tests.support.compilers import needs_compiler
from tests.support.processes import python
from tests.support.rows import full, turning


def turned(layer: nn.Module) -> nn.Module:
    return built(lambda self, x: self.layer(x.t()).t(), layer=layer)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "fewbit": lambda: fitact.activation("gelu"),
    "inverted": lambda: fitact.activation("gelu", method="inverted", bits=1),
    "output": lambda: fitact.activation("tanh", method="output"),
    "fewbit, turned": lambda: turned(fitact.activation("gelu")),
    "output, turned": lambda: turned(fitact.activation("tanh", method="output")),
    "layer norm": lambda: MSLayerNorm(16),
    "rms norm": lambda: MSRMSNorm(16),
}
QUICK = ("fewbit", "output, turned", "rms norm")
EXPORTED = full(turning((True, False), LAYERS, (True, False)), lambda row: row[1] in (*QUICK, "inverted"))
BATCH = ({0: torch.export.Dim("batch")},)


def between_layers(*names: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for name in names for part in (LAYERS[name](), nn.Linear(16, 16))]
    return nn.Sequential(nn.Linear(8, 16), *layers).eval()


def export(model: nn.Module, x: torch.Tensor, *, strict: bool = False, grad: bool = True) -> Any:
    with torch.set_grad_enabled(grad):
        return torch.export.export(model, (x,), strict=strict, dynamic_shapes=BATCH)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    actual = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient is not None for gradient in actual)
    return [y.detach(), *actual]


# Before 2.13 PyTorch warns of what it has just read itself.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize(("strict", "name", "grad"), EXPORTED)
def test_exported_programs(strict: bool, name: str, grad: bool, tmp_path: Path) -> None:
    """Saved and loaded again, too: outputs and gradients are eager's, of any size."""
    program = export(between_layers(name), torch.randn(6, 8), strict=strict, grad=grad)
    torch.export.save(program, tmp_path / "program.pt2")
    for rows in (6, 2000):
        x, model = torch.randn(rows, 8), between_layers(name)
        with torch.set_grad_enabled(grad):
            expected = step(model, x) if grad else [model(x)]
            for other in (program.module(), torch.export.load(tmp_path / "program.pt2").module()):
                other.zero_grad()
                assert all(map(torch.equal, step(other, x) if grad else [other(x)], expected))


@pytest.mark.parametrize("name", ["fewbit", "inverted", "output", "layer norm", "learned"])
def test_other_strides_than_the_example_s(name: str) -> None:
    """No guard asks for those, so the program takes any."""
    make = LAYERS.get(name, lambda: xielu_recompute.XieluRecompute())
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), make(), nn.Conv2d(8, 2, 3))
    x = torch.randn(2, 3, 16, 16)
    program = torch.export.export(model, (x,)).module()
    for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        program.zero_grad()
        model.zero_grad()
        torch.testing.assert_close(step(program, other), step(model, other))


@needs_compiler
@pytest.mark.full
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's own
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    model = between_layers(*QUICK, "inverted", "layer norm")
    # PyTorch's own C++ takes long, and headers that are used once are no faster precompiled.
    options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    path = torch._inductor.aoti_compile_and_package(
        export(model, torch.randn(6, 8)), package_path=str(tmp_path / "model.pt2"), inductor_configs=options
    )
    compiled = torch._inductor.aoti_load_package(path)
    for rows in (6, 2000):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(compiled(x), expected)
    torch.save((x, expected), tmp_path / "expected.pt")
    run = RUN.format(False, 'torch._inductor.aoti_load_package("model.pt2")')
    python("import fitact, torch" + run, folder=tmp_path, warnings="ignore")


RUN = """
x, expected = torch.load("expected.pt")
with torch.set_grad_enabled({}):
    torch.testing.assert_close({}(x), expected)
"""
REGISTERED = """
import sys, torch
torch.ops.fitact.forward.default
assert {"fitact.runtime.norms", "fitact.runtime.shipped"} <= {*sys.modules}
"""


def fails(missing: str, name: str) -> str:
    return f"""
sys.modules[{missing!r}] = None
try:
    import {name}
except ImportError:
    del sys.modules[{missing!r}]
else:
    raise AssertionError
"""


CHOOSE = "fitact.runtime.choose"
LOOKED_FOR = "import sys, fitact, importlib.util as util\nutil.find_spec('torch')"
IMPORTS = {
    "in the runtime": "import fitact.runtime.kernels.reference",
    "torch is looked for, and fails": LOOKED_FOR + fails("torch._utils", "torch"),
    "the runtime fails": "import sys, fitact" + fails(f"{CHOOSE}.detect", f"{CHOOSE}.convert"),
}


def test_import_fitact_is_all_that_loading_needs(tmp_path: Path) -> None:
    model, x = between_layers(*LAYERS), torch.randn(6, 8)
    torch.export.save(export(model, x), tmp_path / "program.pt2")
    torch.save((x, model(x).detach()), tmp_path / "expected.pt")
    run = RUN.format(True, 'torch.export.load("program.pt2").module()')
    python("import torch, fitact" + REGISTERED + run, folder=tmp_path, warnings="ignore")


@pytest.mark.parametrize("order", full(IMPORTS, ("the runtime fails",)))
def test_operators_are_registered_in_any_order_of_imports(order: str) -> None:
    python(IMPORTS[order] + REGISTERED, warnings="ignore")


def test_keys_import_nothing_but_what_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="expected the shipped relu_output to have the key 'relu_output-0'"):
        registry.find("relu_output-0")
    monkeypatch.setattr(shipped, "import_module", lambda name: pytest.fail(f"imports {name}"))
    for key in ("antigravity-0", "os.path-0", "..relu_output-0", "__init__-0", "fits-0", "-0", ""):
        with pytest.raises(RuntimeError, match="import the generated module it comes from"):
            registry.find(key)
