"""Attention that PyTorch composes of other operations: the same bits, and less is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fitact
from fitact.runtime.memory.peak import peak_memory
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.models.prepare import imported
from fitact.runtime.rebuild.attention.steps import attention
from fitact.runtime.rebuild.calls import Looking
from fitact.runtime.torch_internals import FakeTensorMode

from .test_attention import SETTINGS, SIZES, inputs_of, step
from .test_rebuild import HALF, cast, differences

BATCH, HEADS, ROWS, WIDTH = 2, 4, 6, 8
DTYPES = {name: SETTINGS[name] for name in SETTINGS} | {
    "float64": (torch.float64, None),
    "autocast of halves": (HALF, torch.float16),
}


def turned(*shape: int) -> Tensor:
    """Return random heads as models make them: a view of (batch, rows, heads, width)."""
    return torch.randn(*shape).transpose(1, 2).contiguous().transpose(1, 2)


def tensors(
    like: Callable[..., Tensor] = turned, heads: int = HEADS, rows: int = ROWS, width: int = WIDTH
) -> list[Tensor]:
    return [turned(BATCH, HEADS, ROWS, WIDTH), like(BATCH, heads, rows, WIDTH), like(BATCH, heads, rows, width)]


def bias(*shape: int) -> Tensor:
    x = torch.randn(*(shape or (1, HEADS, ROWS, ROWS)))
    return x.index_fill(-1, torch.tensor([1]), -torch.inf)


CASES: dict[str, Callable[[], tuple[list[Tensor], Tensor | None, dict[str, Any]]]] = {
    "bias": lambda: (tensors(), bias(), {}),
    "bias, dropout": lambda: (tensors(), bias(), {"dropout_p": 0.3}),
    "dropout": lambda: (tensors(), None, {"dropout_p": 0.3}),
    "all dropped": lambda: (tensors(), bias(), {"dropout_p": 1.0}),
    "causal, dropout": lambda: (tensors(rows=9), None, {"dropout_p": 0.3, "is_causal": True}),
    "other lengths": lambda: (tensors(rows=9, width=3), bias(BATCH, 1, ROWS, 9), {"scale": 0.3}),
    "negative scale": lambda: (tensors(), bias(ROWS, ROWS), {"scale": -0.7}),
    "groups": lambda: (tensors(heads=2), bias(), {"enable_gqa": True}),
    "one group, dropout": lambda: (tensors(heads=1), None, {"enable_gqa": True, "dropout_p": 0.3}),
    "contiguous": lambda: (tensors(torch.randn), bias(), {}),
    "columns": lambda: (tensors(lambda *sizes: torch.randn(*sizes).mT.contiguous().mT), bias(), {}),
    "one text": lambda: ([one[:1] for one in tensors()], bias(), {}),
    "rows without": lambda: (tensors(), bias().index_fill(-2, torch.tensor([2]), -torch.inf), {}),
    "three dimensions": lambda: ([one[0] for one in tensors()], bias(ROWS, ROWS), {"dropout_p": 0.3}),
    "every other": lambda: ([torch.randn(BATCH, HEADS, ROWS, 2 * WIDTH)[..., ::2] for _ in "qkv"], bias(), {}),
}


def attend(*given: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*given, **options)


def attended(case: str, setting: str, looking: bool) -> tuple[tuple[Any, ...], int]:
    """Return output, gradients and a random number that follows, and the bytes that are kept."""
    dtype, autocast = DTYPES[setting]
    torch.manual_seed(0)
    given, biases, options = CASES[case]()
    leaves = [one.to(dtype).requires_grad_() for one in (*given, *([] if biases is None else [biases]))]
    inner = [one * 1 for one in leaves]
    with count_saved() as saved, cast(autocast), Looking(looking):
        y = attend(*inner, **options)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return (y.detach(), torch.rand(1), {str(i): one.grad for i, one in enumerate(leaves)}), saved.bytes


@pytest.mark.parametrize("setting", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_bits(case: str, setting: str) -> None:
    """Also the strides of the output, and the generator's state."""
    (expected, stock), (found, kept) = (attended(case, setting, looking) for looking in (False, True))
    assert not differences(expected, found)
    assert expected[0].stride() == found[0].stride()
    wide = setting not in ("float32", "float64")
    drops = 0 < CASES[case]()[2].get("dropout_p", 0) < 1
    assert kept < stock if wide or drops else kept <= stock


def test_what_is_kept() -> None:
    """By hand: q, k and v as they are, a number of float32 for each weight, and a bit of dropout."""
    dtype, sizes = HALF, (2, 4, 256, 64)
    q, k, v = (turned(*sizes).to(dtype).requires_grad_() * 1 for _ in "qkv")
    mask = torch.randn(1, 4, 256, 256).to(dtype).requires_grad_()
    with count_saved() as saved, Looking():
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)
    del y
    weights = 2 * 4 * 256 * 256
    assert saved.bytes == 3 * q.nbytes + 4 * weights + weights // 8


def test_views_of_one_tensor() -> None:
    """As GPT-2's: that is kept, once, and not each view of it wider."""
    x = torch.randn(2, 256, 3 * 4 * 64).to(HALF).requires_grad_() * 1
    q, k, v = (one.view(2, 256, 4, 64).transpose(1, 2) for one in x.split(256, dim=-1))
    with count_saved() as saved, Looking():
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    del y
    weights = 2 * 4 * 256 * 256
    assert saved.bytes == x.nbytes + 4 * weights + weights // 8


def test_halves_are_added_as_such_if_told_so() -> None:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not before)
    try:
        for case in ("bias, dropout", "groups"):
            (expected, stock), (found, kept) = (attended(case, "bfloat16", looking) for looking in (False, True))
            assert not differences(expected, found)
            assert kept <= stock
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def test_a_bias_that_is_wider() -> None:
    def run(looking: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        leaves = [*(one.to(HALF).requires_grad_() for one in tensors()), bias().requires_grad_()]
        with Looking(looking):
            y = attend(*leaves)
        y.sum().backward()
        return [y.detach(), *(one.grad for one in leaves)]

    assert not differences(run(False), run(True))


@pytest.mark.parametrize("frozen", ["q", "k", "v", "qk", "qkv"])
def test_frozen_inputs(frozen: str) -> None:
    def run(looking: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        leaves = [
            one.to(HALF).requires_grad_(name not in frozen) for name, one in zip("qkv", tensors(), strict=True)
        ]
        leaves.append(bias().to(HALF).requires_grad_())
        with Looking(looking):
            y = attend(*leaves, dropout_p=0.2)
        y.sum().backward()
        return [y.detach(), *(one.grad for one in leaves)]

    assert not differences(run(False), run(True))


def test_one_tensor_for_all() -> None:
    """Its gradients are added in PyTorch's order."""

    def run(looking: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, mask = turned(BATCH, HEADS, ROWS, WIDTH).to(HALF).requires_grad_(), bias().to(HALF).requires_grad_()
        with Looking(looking):
            y = F.scaled_dot_product_attention(x, x, x, mask) + F.scaled_dot_product_attention(x, x, x, mask)
        y.square().sum().backward()
        return [y.detach(), x.grad, mask.grad]

    assert not differences(run(False), run(True))


# --------------------------------------------------------------------------------------------- what PyTorch fuses


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("case", ["none", "given", "causal", "bool", "trained", "dropout", "not allowed"])
def test_only_where_pytorch_fuses_nothing(case: str, fake: bool) -> None:
    """PyTorch's own node says what it chose, also for tensors without memory."""
    options: dict[str, Any] = {"is_causal": case == "causal", "dropout_p": 0.1 if case == "dropout" else 0.0}
    backends = [SDPBackend.MATH] + [SDPBackend.FLASH_ATTENTION] * (case != "not allowed")
    with FakeTensorMode() if fake else nullcontext(), sdpa_kernel(backends):
        given = [one.requires_grad_() for one in tensors()]
        if case in ("given", "bool", "trained"):
            options["attn_mask"] = bias() > 0 if case == "bool" else bias().requires_grad_(case == "trained")
        node = attend(*given, **options).grad_fn
        composed = attention(lambda function, *args, **kwargs: function(*args, **kwargs), given, options)
    assert (composed is None) == type(node).__name__.startswith("ScaledDotProduct")
    assert (composed is None) == (case in ("none", "given", "causal", "bool"))


WRONG: dict[str, Mapping[str, Any]] = {
    "mask and causal": {"attn_mask": bias(), "is_causal": True, "dropout_p": 0.1},
    "dtype of the mask": {"attn_mask": bias().long(), "dropout_p": 0.1},
    "size of the mask": {"attn_mask": bias()[..., :5].requires_grad_()},
    "probability": {"dropout_p": 1.5},
    "no such option": {"dropout": 0.1},
    "width": {"key": torch.randn(BATCH, HEADS, ROWS, 3), "dropout_p": 0.1},
    "rows": {"value": torch.randn(BATCH, HEADS, 2, WIDTH), "dropout_p": 0.1},
    "heads": {"key": torch.randn(BATCH, 3, ROWS, WIDTH), "dropout_p": 0.1, "enable_gqa": True},
    "wide mask": {"attn_mask": bias().double(), "dropout_p": 0.1},
    "dtypes": {"key": torch.randn(BATCH, HEADS, ROWS, WIDTH).double(), "dropout_p": 0.1},
    "a number": {"key": 3},
    "nothing allowed": {"attn_mask": bias().requires_grad_()},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_pytorch_says(name: str) -> None:
    q, k, v = (one.requires_grad_() for one in tensors())
    given = {"query": q, "key": k, "value": v} | dict(WRONG[name])
    messages = []
    for looking in (False, True):
        allowed = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "nothing allowed" else nullcontext()
        with pytest.raises((RuntimeError, TypeError)) as raised, Looking(looking), allowed:
            F.scaled_dot_product_attention(**given)
        messages.append((raised.type, str(raised.value)))
    assert messages[0] == messages[1]


# --------------------------------------------------------------------------------------------------------- models


class Biased(nn.Module):
    """Attention with a table of biases that is trained; options are those of PyTorch's function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.o = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)
        self.table = nn.Embedding(16, HEADS)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for layer in self.qkv)
        places = torch.arange(x.shape[1])
        mask = self.table((places[:, None] - places).abs() % 16).permute(2, 0, 1)[None]
        y = F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), **self.options)
        z: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return z


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_peak(dtype: torch.dtype, p: float) -> None:
    """Of attention alone, whether it keeps less or not."""
    torch.manual_seed(0)
    model, x = Biased(dropout_p=p).to(dtype), torch.randn(2, 64, 32).to(dtype).requires_grad_()

    def step(looking: bool) -> None:
        model.zero_grad()
        with Looking(looking):
            y = model(x)
        y.sum().backward()

    peaks = [peak_memory(partial(step, looking), model)["total"] for looking in (False, True)]
    assert peaks[1] <= peaks[0]


ONE = {"t5": {"num_layers": 1}, "bert": {"num_hidden_layers": 1}}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["t5, gated", "bert"])
def test_models(name: str, setting: str) -> None:
    """Attention that transformers leave to PyTorch: with a trained bias, or with dropout."""
    dtype, autocast = SETTINGS[setting]
    transformers = imported("transformers")
    kind, sizes = SIZES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(sizes | ONE[kind]))
    config.use_cache = False
    stock = transformers.AutoModel.from_config(config, attn_implementation="sdpa").to(dtype).train()
    model, inputs = copy.deepcopy(stock), inputs_of(name, dtype)
    with cast(autocast):
        report = fitact.rebuild(model, example_inputs=inputs)
    assert any("ttention" in site.before for site in report)
    found = []
    for one in (stock, model):
        given = inputs_of(name, dtype)
        y = step(one, given, autocast)
        found.append((y, given["inputs_embeds"].grad, {key: each.grad for key, each in one.named_parameters()}))
    assert not differences(found[0], found[1])
    wide = inputs_of(name, dtype, 2, 64)
    counts = []
    for one in (stock, model):
        with cast(autocast), count_saved(one) as saved:
            z = one(**wide)
        del z
        counts.append(saved.bytes)
    assert counts[1] < 0.5 * counts[0]
