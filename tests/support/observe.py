"""Runs standalone folders where fitact cannot be imported, then the package's own modules, and compares the two.

python observe.py FOLDER "as it is"|"without triton"|interpreted NAMES...
"""

import importlib
import sys
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

folder, mode, *names = sys.argv[1:]
if mode == "without triton":
    sys.modules["triton"] = None


class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "fitact":
            raise ImportError(name)


sys.meta_path.insert(0, Blocked())
try:
    importlib.import_module("fitact")
except ImportError:
    pass
else:
    raise AssertionError("fitact can be imported")


def observe(module, name):
    """Everything that can be told apart: values, gradients, dtypes, strides, and the bytes saved."""
    function, kind = getattr(module, name), getattr(module, module.__all__[0])
    quick = mode == "interpreted"
    generator = torch.Generator().manual_seed(0)
    size = (1 if quick else 2, 9001)
    x = 3 * torch.randn(size, generator=generator)
    x[0, :8] = torch.tensor([0.0, -0.0, 1e-30, 20.0, -20.0, torch.inf, -torch.inf, torch.nan])
    dy = torch.randn(size, generator=generator)
    found = {}

    def note(what, function, x, dy):
        saved = []
        leaf = x.detach().requires_grad_()
        with saved_tensors_hooks(lambda t: saved.append(t.untyped_storage().nbytes()) or t, lambda t: t):
            y = function(leaf)
        y.backward(dy.to(y.dtype))
        found[what] = (bits(y), bits(leaf.grad), y.dtype, leaf.grad.dtype, y.stride(), saved)

    def bits(t):
        return t.detach().contiguous().view(torch.uint8)

    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    for dtype in dtypes[:2] if quick else dtypes:
        note((dtype, "dense"), function, x.to(dtype), dy)
        if not quick:
            note((dtype, "small"), function, x[:, :10].to(dtype), dy[:, :10])
            note((dtype, "transposed"), function, x.to(dtype).t(), dy.t())
            note((dtype, "strided"), function, x.to(dtype)[:, ::2], dy[:, ::2])
    if not quick:
        with torch.autocast("cpu", torch.bfloat16):
            note("autocast", kind(), x, dy)
        for reentrant in (False, True):
            note(("checkpoint", reentrant), partial(checkpoint, kind(), use_reentrant=reentrant), x, dy)
        note("vmap", torch.vmap(function), x, dy)
        found["func.grad"] = [bits(torch.func.grad(lambda x: function(x).sum())(x))]
        try:
            leaf = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
            torch.autograd.grad(dx.sum(), leaf)
        except RuntimeError as error:
            found["twice"] = [str(error)]
    return found


sys.path.insert(0, folder)
alone = {name: importlib.import_module(name) for name in names}
launched = []
for module in alone.values():
    if mode == "interpreted":
        activations = module.runtime.kernels.activations

        def launch(kernel, *arguments, launch=activations.launch):
            launched.append(kernel)
            launch(kernel, *arguments)

        activations.launch = launch
    has_triton = module.runtime.kernels.triton_compat.HAS_TRITON
    assert has_triton == (mode != "without triton")
observed = {name: observe(module, name) for name, module in alone.items()}
assert "fitact" not in sys.modules
assert len(launched) == (4 * len(names) if mode == "interpreted" else 0), launched
del sys.meta_path[0]
for name in names:
    packaged = importlib.import_module(f"fitact.generated.{name}")
    expected = observe(packaged, name)
    assert expected.keys() == observed[name].keys()
    for what, one in expected.items():
        for a, b in zip(one, observed[name][what], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (name, what)
print("compared", len(names))
