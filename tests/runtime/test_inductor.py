"""FITACT_CPU=inductor: compiled coding and decoding, in a process of its own, against the PyTorch path."""

import os
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._inductor.graph import GraphLowering

import fitact
from fitact.runtime.kernels import inductor as compiled
from fitact.runtime.kernels import registry
from tests.conftest import ROOT
from tests.support.compilers import needs_compiler
from tests.support.generated import backward_op, forward_op, same
from tests.support.processes import python

SCRIPT = """
import sys
import torch
from tests.runtime.test_inductor import computed

torch.save(computed(*sys.argv[2:]), sys.argv[1])
"""


def computed(*cases: str) -> dict[tuple[str, str, int], tuple[torch.Tensor, ...]]:
    """Outputs, codes and gradients as this process computes them; a case is a module and dtypes."""
    found = {}
    for case in cases:
        name, *dtypes = case.split()
        module = import_module(f"fitact.generated.{name}")
        for dtype in map(torch.__dict__.__getitem__, dtypes):
            torch.manual_seed(0)
            for elements in (8192 * 5 + 77, 8192, 100, 0):
                x = (torch.randn(elements) * 3).to(dtype)
                x[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")][: len(x)]).to(dtype)
                dy = torch.randn(elements).to(dtype)
                y, codes = forward_op(x, dtype, module._KEY)
                saved = y if registry.find(module._KEY).saves_output else None
                dx = backward_op(dy, saved, codes, dtype, module._KEY)[0]
                found[name, str(dtype), elements] = (y, codes, dx)
    return found


CASES = [
    *("gelu_fewbit3 float32 float16", "tanh_fewbit3 bfloat16", "gelu_fewbit1 float64", "gelu_fewbit4 bfloat16"),
    *("hardswish_inverted2 float32", "gelu_inverted1 bfloat16", "softplus_output float32"),
]


@needs_compiler
@pytest.mark.long
@pytest.mark.full
def test_the_same_codes_and_gradients(tmp_path: Path) -> None:
    assert not os.environ.get("FITACT_CPU")
    python(SCRIPT, tmp_path / "found.pt", *CASES, folder=ROOT, FITACT_CPU="inductor", TRITON_INTERPRET="0")
    eager, compiled = computed(*CASES), torch.load(tmp_path / "found.pt")
    assert eager.keys() == compiled.keys()
    for key, (y, codes, dx) in eager.items():
        own_y, own_codes, own_dx = compiled[key]
        assert same(y, own_y), key
        assert torch.equal(codes, own_codes), key
        if "fewbit" in key[0]:
            assert same(dx, own_dx), key
        else:  # products and sums may be contracted, and functions come from another library
            ulp = torch.finfo(dx.dtype).eps
            torch.testing.assert_close(own_dx, dx, rtol=2 * ulp, atol=max(4e-5, ulp), equal_nan=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [("fast", "FITACT_CPU: expected inductor or nothing, got 'fast'"), ("inductor", "needs a C\\+\\+ compiler")],
)
def test_refused(value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("FITACT_CPU", value), ("PATH", str(tmp_path)), ("CXX", "")):
        monkeypatch.setenv(name, text)
    compiled.asked_for.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=message):
            fitact.activation("gelu")(torch.randn(9, requires_grad=True))
    finally:
        compiled.asked_for.cache_clear()


@needs_compiler
def test_borders_are_constants_of_the_compiled_code() -> None:
    """Of a second activation of the same width, too; and one compilation serves any number of tiles."""
    sources: list[str] = []
    for borders in ((-1.25, 0.5, 1.75), (-2.25, 0.125, 2.5)):
        encode = compiled.encoder(borders, 2, False, torch.float32)
        some, more = (
            (torch.randn(tiles, 8, 1024), torch.empty(tiles, 2, 1024, dtype=torch.uint8)) for tiles in (3, 5)
        )
        with mock.patch.object(GraphLowering, "save_output_code", sources.append):
            encode(*some)
        source = sources[-1]
        assert all(f"static_cast<float>({border})" in source for border in borders)
        assert "const double*" not in source
        with torch._dynamo.config.patch(error_on_recompile=True):
            encode(*more)
