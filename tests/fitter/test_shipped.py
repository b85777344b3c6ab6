"""The shipped fits: made again they are the same to the byte, on other CPUs too."""

import platform

import numpy as np
import pytest

from fitact.fitter.methods import again
from fitact.fitter.records import read
from tests.conftest import ROOT
from tests.support.processes import python
from tests.support.rows import full

FITS = ROOT / "generated" / "fits"
NAMES = sorted(path.stem for path in FITS.glob("*.json"))
QUICK = [name for name in NAMES if name.endswith(("_published", "_output")) or name == "gelu_relumix2"]


@pytest.mark.parametrize("name", full(NAMES, QUICK))
@pytest.mark.filterwarnings("ignore:beyond the domain -10 10 the derivative of relu2:fitact.FitWarning")
def test_made_again(name: str) -> None:
    assert again(read(FITS / f"{name}.json")).to_json() == (FITS / f"{name}.json").read_text()


# NumPy, BLAS and the C library use no kernels of newer CPUs.
OLDER = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])),
    "OPENBLAS_CORETYPE": "Nehalem" if platform.machine() in ("x86_64", "AMD64") else "ARMV8",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
}
AGAIN = """
import sys
from pathlib import Path
from fitact.fitter.methods import again
from fitact.fitter.records import read
for name in sys.argv[1:]:
    assert again(read(Path(name))).to_json() == Path(name).read_text(), name
"""
TOGETHER = ["gelu_inverted1", "gelu_tanh_inverted1", "gelu_fewbit3", "silu_fewbit4", "mish_relumix2"]
TOGETHER += ["silu_relumix2", *(f"../../notebooks/fits/{name}_relumix4" for name in ("gelu", "silu"))]


@pytest.mark.parametrize("names", full([["silu_inverted1"], TOGETHER], lambda names: len(names) == 1))
def test_made_again_on_a_cpu_with_other_kernels(names: list[str]) -> None:
    python(AGAIN, *(FITS / f"{name}.json" for name in names), **OLDER)
