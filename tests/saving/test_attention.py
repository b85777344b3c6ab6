"""Attention that is not fused, by PyTorch or by models: the same bits, and less is saved."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fitact
from fitact.runtime.choose.policies import SELECTIVE, changed
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving.attention import attention
from fitact.runtime.torch_internals import FakeTensorMode
from tests.support import saving
from tests.support.around import AROUND
from tests.support.blocks import built
from tests.support.models import FAMILIES, MORE, TEXT
from tests.support.saving import HALF, Operators, agree, both_ways, cast, observed, peaks

BATCH, HEADS, ROWS, WIDTH = 2, 4, 6, 8
DTYPES = saving.SETTINGS | {"autocast of halves": (HALF, torch.float16)}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, HALF])


def turned(*shape: int) -> Tensor:
    """Return random heads as models make them: a view of (batch, rows, heads, width)."""
    return torch.randn(*shape).transpose(1, 2).contiguous().transpose(1, 2)


def tensors(
    like: Callable[..., Tensor] = turned, heads: int = HEADS, rows: int = ROWS, width: int = WIDTH
) -> list[Tensor]:
    return [turned(BATCH, HEADS, ROWS, WIDTH), like(BATCH, heads, rows, WIDTH), like(BATCH, heads, rows, width)]


def bias(*shape: int) -> Tensor:
    return torch.randn(*(shape or (1, HEADS, ROWS, ROWS))).index_fill(-1, torch.tensor([1]), -torch.inf)


attend = F.scaled_dot_product_attention
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
    "one text": lambda: ([tensor[:1] for tensor in tensors()], bias(), {}),
    "rows without": lambda: (tensors(), bias().index_fill(-2, torch.tensor([2]), -torch.inf), {}),
    "three dimensions": lambda: ([tensor[0] for tensor in tensors()], bias(ROWS, ROWS), {"dropout_p": 0.3}),
    "every other": lambda: ([torch.randn(BATCH, HEADS, ROWS, 2 * WIDTH)[..., ::2] for _ in "qkv"], bias(), {}),
}


def compared(case: str, setting: str, frozen: str = "", call: Callable[..., Tensor] = attend, **given: Any) -> Any:
    """Compare both ways; return the bytes that are saved."""
    dtype, autocast = DTYPES[setting]
    inputs, biases, options = CASES[case]()
    leaves = [tensor.to(dtype) for tensor in (*inputs, *([] if biases is None else [biases]))]
    for name, tensor in zip("qkvb", leaves, strict=False):
        tensor.requires_grad_(name not in frozen)
    return both_ways(partial(call, **options), *(tensor * 1 for tensor in leaves), autocast=autocast, **given)


def cast_within(q: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return attend(*[q.half()] * 3, mask)


@pytest.mark.parametrize("again", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("setting", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_bits(case: str, setting: str, again: bool) -> None:
    before, after = compared(case, setting, recompute_attention=again)
    wide = setting not in ("float32", "float64", "float64 in autocast")
    drops = 0 < CASES[case]()[2].get("dropout_p", 0) < 1
    assert after < before if wide or drops else after <= before


@pytest.mark.parametrize(
    ("case", "frozen", "call"),
    [
        *(("bias, dropout", frozen, attend) for frozen in ("q", "k", "v", "qk", "qkv", "b")),
        ("bias", "", lambda q, k, v, mask: attend(q, k, v, mask.float())),
        ("bias", "kv", lambda q, _, __, mask: attend(q, q, q, mask) + attend(q, q, q, mask)),
        ("bias", "kv", lambda q, _, __, mask: cast_within(q, mask)),
    ],
)
def test_frozen_inputs_a_wider_bias_and_one_tensor_for_all(case: str, frozen: str, call: Any) -> None:
    """Gradients are added in PyTorch's order."""
    compared(case, "bfloat16", frozen=frozen, call=call)


def test_halves_are_added_as_such_if_told_so() -> None:
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not allowed)
    try:
        for case in ("bias, dropout", "groups"):
            before, after = compared(case, "bfloat16")
            assert after <= before
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def test_what_is_saved() -> None:
    """By hand: q, k and v as they are, a number of float32 for each weight, and a bit of dropout."""
    given = [turned(2, 4, 256, 64).to(HALF).requires_grad_() * 1 for _ in "qkv"]
    mask = torch.randn(1, 4, 256, 256).to(HALF).requires_grad_()
    weights = 2 * 4 * 256 * 256
    _, after = both_ways(partial(attend, dropout_p=0.1), *given, mask)
    assert after == 3 * given[0].nbytes + 4 * weights + weights // 8

    def views(x: Tensor) -> Tensor:
        """As GPT-2's: a tensor is saved once, and not each view of it wider."""
        return attend(*(part.view(2, 256, 4, 64).transpose(1, 2) for part in x.split(256, dim=-1)), dropout_p=0.1)

    x = torch.randn(2, 256, 3 * 4 * 64).to(HALF).requires_grad_() * 1
    assert both_ways(views, x)[1] == x.nbytes + 4 * weights + weights // 8


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("case", ["none", "given", "causal", "bool", "trained", "dropout", "not allowed"])
def test_only_where_pytorch_fuses_nothing(case: str, fake: bool) -> None:
    """PyTorch's own node says what it chose, also for tensors without memory."""
    options: dict[str, Any] = {"is_causal": case == "causal", "dropout_p": 0.1 * (case == "dropout")}
    backends = [SDPBackend.MATH] + [SDPBackend.FLASH_ATTENTION] * (case != "not allowed")
    with FakeTensorMode() if fake else nullcontext(), sdpa_kernel(backends):
        given = [tensor.requires_grad_() for tensor in tensors()]
        if case in ("given", "bool", "trained"):
            options["attn_mask"] = bias() > 0 if case == "bool" else bias().requires_grad_(case == "trained")
        node = attend(*given, **options).grad_fn
        composed = attention(lambda call, *args, **kwargs: call(*args, **kwargs), given, options, lambda *_: None)
    assert (composed is None) == type(node).__name__.startswith("ScaledDotProduct")
    assert (composed is None) == (case in ("none", "given", "causal", "bool"))


WRONG: dict[str, dict[str, Any]] = {
    "mask and causal": {"attn_mask": bias(), "is_causal": True, "dropout_p": 0.1},
    "size of the mask": {"attn_mask": bias()[..., :5].requires_grad_()},
    "no such option": {"dropout": 0.1},
    "width": {"key": torch.randn(BATCH, HEADS, ROWS, 3), "dropout_p": 0.1},
    "heads": {"key": torch.randn(BATCH, 3, ROWS, WIDTH), "dropout_p": 0.1, "enable_gqa": True},
    "dtypes": {"key": torch.randn(BATCH, HEADS, ROWS, WIDTH).double(), "dropout_p": 0.1},
    "nothing allowed": {"attn_mask": bias().requires_grad_()},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("again", [False, True], ids=["saved", "recomputed"])
def test_nested_tensors(again: bool) -> None:
    def compute(*parts: Tensor) -> Tensor:
        x = torch.nested.as_nested_tensor([*parts])
        return attend(x, x * 2, x * 3).to_padded_tensor(0.0)

    both_ways(compute, *(torch.randn(1, rows, 8).requires_grad_() for rows in (3, 5)), recompute_attention=again)


# Options of the layer and of its call; and of the context, with the most that its gradients may be off.
MULTIHEAD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dropout": ({"dropout": 0.1}, {}, {}),
    "its weights": ({"dropout": 0.1}, {"need_weights": True}, {}),
    "extra keys, not by batches": (
        {"dropout": 0.1, "add_bias_kv": True, "add_zero_attn": True, "batch_first": False},
        {},
        {},
    ),
    "a trained mask": ({"dropout": 0.1}, {"attn_mask": bias(32, 32).requires_grad_()}, {}),
    "recomputed": ({}, {}, {"recompute_attention": True}),
    "coarse": ({}, {}, {"error": "coarse", "most": 0.2}),
}


@pytest.mark.parametrize("case", MULTIHEAD)
def test_multihead_attention(case: str) -> None:
    """PyTorch hands it to modes as one function; the context sees each call in it."""
    options, call, given = MULTIHEAD[case]
    layer = nn.MultiheadAttention(64, 4, **{"batch_first": True} | options)
    rest = {"need_weights": False} | call

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.layer(y, y, y, **rest)[0]

    model = built(forward, norm=nn.LayerNorm(64), layer=layer)
    x = torch.randn(32, 32, 64, requires_grad=True)
    before, after = both_ways(model, x, **given)
    assert after < 0.85 * before
    if not given:  # the mask alone takes that much
        assert before - after > 4 * 32 * 32**2 * 3


class Whole(Tensor):
    """Fails in a linear layer, which attention as a whole does not call by it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not F.linear
        return super().__torch_function__(func, types, args, kwargs)


def test_a_class_of_the_users_gets_the_whole_of_it() -> None:
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8).as_subclass(Whole)
    with fitact.saving():
        layer(x, x, x)
    with pytest.raises(AssertionError):
        F.linear(x, layer.out_proj.weight)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_pytorch_says(name: str) -> None:
    given = dict(zip(("query", "key", "value"), (tensor.requires_grad_() for tensor in tensors()), strict=True))
    messages = []
    for context in (nullcontext(), fitact.saving()):
        allowed = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "nothing allowed" else nullcontext()
        with pytest.raises((RuntimeError, TypeError)) as raised, context, allowed:
            attend(**(given | WRONG[name]))
        messages.append((raised.type, str(raised.value)))
    assert messages[0] == messages[1]


def test_what_is_saved_if_it_runs_again() -> None:
    """By hand: q, k and v, from which the output is computed again for the layer that reads it, and the mask."""
    layer, trained = nn.Linear(64, 64), torch.randn(1, 4, 64, 64).requires_grad_()
    for mask, size in (None, 0), (torch.rand(2, 4, 64, 64) > 0.1, 2 * 4 * 64 * 64 // 8), (trained, trained.nbytes):
        q, k, v = (turned(2, 4, 64, 16).requires_grad_() * 1 for _ in "qkv")
        with count_saved(layer) as saved, fitact.saving(recompute_attention=True):
            y = layer(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        del y
        assert saved.bytes == 3 * q.nbytes + size


def attending(trained: bool = True) -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
        return x + m.o(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return built(call, qkv=nn.Linear(32, 96), o=nn.Linear(32, 32).requires_grad_(trained))


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_run_once_in_a_pass(trained: bool) -> None:
    """Whoever reads the output; in two passes twice, with the same gradients and nothing held between them."""
    model, x = attending(trained), torch.randn(2, 8, 32, requires_grad=True)
    with Operators() as expected:
        model(x).sin().sum().backward()
    with fitact.saving(recompute_attention=True):
        loss = model(x).sin().sum()
    with Operators() as counted:
        actual = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    assert all(torch.equal(each, x.grad) for each in actual if x.grad is not None)
    for operators, runs in ((expected, 1), (counted, 2)):
        fused = ["backward" in name for name in operators.names if "flash_attention" in name]
        assert (fused.count(False), fused.count(True)) == (runs, runs)


@dtypes
def test_peak_if_it_runs_again(dtype: torch.dtype) -> None:
    baseline, model = (nn.Sequential(attending(), attending()).to(dtype) for _ in range(2))
    fitact.convert(model, recompute_attention=True)
    before, after = peaks((baseline, model), torch.randn(4, 64, 32).to(dtype).requires_grad_())
    assert after < before


def test_second_derivative_if_it_runs_again() -> None:
    """Of attention that is not fused: PyTorch has no other's. Its terms are added in another order."""
    results = []
    for context in (nullcontext(), fitact.saving(recompute_attention=True)):
        torch.manual_seed(0)
        q, k, v = (turned(1, 2, 4, 8).requires_grad_() for _ in "qkv")
        with context, sdpa_kernel(SDPBackend.MATH):
            y = attend(q, k, v)
        (first,) = torch.autograd.grad(y.sin().sum(), q, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), (q, k, v))])
    assert torch.equal(*(each[0] for each in results))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("around", ["checkpoint", "reentrant"])
def test_checkpointed_if_it_runs_again(around: str, inside: bool) -> None:
    """A checkpoint gives each tensor once, and attention's is read twice: for its gradients and its output."""
    model, x = attending(), torch.randn(2, 8, 32)
    expected = observed(copy.deepcopy(model), AROUND[around], x)
    if inside:
        fitact.convert(model, recompute_attention=True)
    with nullcontext() if inside else fitact.saving(recompute_attention=True):
        assert not saving.differences(expected, observed(model, AROUND[around], x))


BLOCKS = ("T5Block", "GPT2Block", "BertLayer", "LlamaDecoderLayer")
BERT, T5 = FAMILIES["bert"], MORE["t5"] | {"d_ff": 192}
EAGER: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5 | {"feed_forward_proj": "relu"}),
    "t5, gated": ("t5", T5),
    "gpt2": ("gpt2", FAMILIES["gpt2"] | {"bos_token_id": 0, "eos_token_id": 0}),
    "bert": ("bert", BERT),
    "llama": ("llama", TEXT | {"intermediate_size": 128, "attention_dropout": 0.1}),
}
# Attention that transformers leave to PyTorch, which does not fuse it: with a trained bias, or with dropout.
SDPA = {"t5, gated, sdpa": ("t5", T5 | {"num_layers": 1}), "bert, sdpa": ("bert", BERT | {"num_hidden_layers": 1})}


def model_of(name: str) -> nn.Module:
    transformers = imported("transformers")
    kind, sizes = (EAGER | SDPA)[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    return transformers.AutoModel.from_config(config, attn_implementation="sdpa" if name in SDPA else "eager")


def call(name: str, model: Any, x: Tensor) -> Tensor:
    given = {"decoder_inputs_embeds": x.detach().flip(0)} if name.startswith("t5") else {}
    return model(inputs_embeds=x, **given).last_hidden_state


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("name", [*EAGER, *SDPA])
def test_models(name: str, setting: str) -> None:
    """The same bits; less is saved than by selective checkpointing."""
    dtype, autocast = saving.SETTINGS[setting]
    make, run = partial(model_of, name), partial(call, name)
    models = agree(make, partial(saving.train, call=run), torch.randn(2, 8, 48), dtype, autocast)
    wide = torch.randn(2 if name in SDPA else 4, 64, 48).to(dtype).requires_grad_()
    blocks = [module for module in models[0].modules() if type(module).__name__ in BLOCKS]
    with cast(autocast):
        before, after = (saving.saved_bytes_of(each, lambda model=each: run(model, wide)) for each in models)
        with changed(blocks, [SELECTIVE] * len(blocks)):
            selective = saving.saved_bytes_of(models[0], lambda: run(models[0], wide))
    assert after < (0.5 * before if name in SDPA else selective)


@dtypes
@pytest.mark.parametrize("name", [*EAGER, *SDPA])
def test_peak_of_models(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, 48).to(dtype).requires_grad_()
    before, after = peaks(saving.pair(partial(model_of, name), dtype), x, partial(call, name))
    assert after < before


WEIGH: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda scores: F.softmax(scores, -1),
    "dropout": lambda scores: F.dropout(F.softmax(scores, -1), 0.2),
    "method": lambda scores: F.dropout(scores.softmax(-1), 0.2),
    "wide by dtype": lambda scores: F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(scores.dtype), 0.2),
    "wide by cast": lambda scores: F.dropout(F.softmax(scores.float(), -1).type_as(scores), 0.2),
    "wide, by type": lambda scores: F.dropout(torch.softmax(scores.float(), -1).type(scores.dtype), 0.2),
    "dropped before the cast": lambda scores: F.dropout(F.softmax(scores.float(), -1), 0.2),
    "double": lambda scores: F.softmax(scores.double(), -1).to(scores.dtype),
    "masked in place": lambda scores: F.softmax(scores.masked_fill_(scores < -1, -1e4), -1),
    "cast in between changed": lambda scores: F.softmax(scores.float().mul_(0.7), -1),
    "sigmoid": lambda scores: F.dropout(scores.sigmoid(), 0.2),
    "relu": lambda scores: F.dropout(F.relu(scores), 0.2) * 2,
    "changed after": lambda scores: F.dropout(F.softmax(scores, -1).exp(), 0.2).mul_(2),
    "read again": lambda scores: (lambda y: F.dropout(y, 0.2) + y * y)(F.softmax(scores.float(), -1)),
}
# What saves its softmax alone, once.
NO_LESS = {("plain", torch.float32, None), ("plain", HALF, None), ("cast in between changed", torch.float32, None)}


@saving.precisions
@pytest.mark.parametrize("weigh", WEIGH)
def test_weights(weigh: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.o(WEIGH[weigh](m.q(x) @ m.k(x).transpose(-1, -2) * 0.25).to(x.dtype) @ m.v(x))

    x, wide, layers = torch.randn(3, 5, 16), torch.randn(2, 200, 16), {name: nn.Linear(16, 16) for name in "qkvo"}
    before, after = saving.saving_less(lambda: built(call, **layers), x, wide, dtype=dtype, autocast=autocast)
    assert after < before or (after == before and (weigh, dtype, autocast) in NO_LESS)


def heads(m: Any, x: Tensor) -> list[Tensor]:
    return [layer(x).view(4, 64, 4, 16).transpose(1, 2) for layer in m.qkv]


def layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(64, 64) for _ in "qkv")


@pytest.mark.parametrize("autocast", [None, HALF])
@pytest.mark.parametrize("read", [lambda m, z: m.norm(z.float()), lambda _, z: z * 2 + 0.5], ids=["norm", "sum"])
def test_bits_of_queries(read: Callable[[Any, Tensor], Tensor], autocast: torch.dtype | None) -> None:
    """Attention reads at least 8 bits, also of queries and keys that autocast casts, whatever else reads."""

    def call(m: Any, x: Tensor) -> Tensor:
        q, k, v = heads(m, x)
        y = [read(m, z) for z in (q, k)]
        others = F.gelu(q) + F.gelu(k)  # which save q and k after these are computed from them
        return attend(*y, v, scale=1.0) + 0 * others

    model = built(call, qkv=layers(), norm=nn.RMSNorm(16, elementwise_affine=False))
    given = {"error": "rounding", "bits": {"norm": 3, "activation": 3, "attention": 8}}
    both_ways(model, torch.randn(4, 64, 64), autocast=autocast, most=0.15, **given)


class Own(torch.autograd.Function):
    """Attention as another library fuses it: its weights are computed again from what it saves."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        ctx.save_for_backward(q, k, v, scores.logsumexp(-1, keepdim=True))
        return scores.softmax(-1) @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, sums = ctx.saved_tensors
        weights = (q @ k.mT * 0.25 - sums).exp()
        of_weights = grads[0] @ v.mT
        scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * 0.25
        return scores @ k, scores.mT @ q, weights.mT @ grads[0]


QK, AV = "bhtd,bhsd->bhts", "bhts,bhsd->bhtd"
ATTEND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fused": attend,
    "own": Own.apply,
    "einsum": lambda q, k, v: torch.einsum(AV, torch.einsum(QK, q, k).mul(0.25).softmax(-1), v),
    "@": lambda q, k, v: (q @ k.mT).mul(0.25).softmax(-1) @ v,
}


def test_large_logits() -> None:
    """Fused attention reads no codes unless it has bits, nor do other libraries' functions.

    By `einsum` attention saves what products save.
    """

    def call(m: Any, x: Tensor) -> Tensor:
        q, k, v = heads(m, x)
        return ATTEND[name](m.norm(q), m.norm(k), v)

    torch.manual_seed(0)
    sizes = {}
    for name, (error, most) in product(ATTEND, (("rounding", 0.01), ("coarse", 0.2))):
        model = built(call, qkv=layers(), norm=nn.RMSNorm(16))
        nn.init.constant_(model.norm.weight, 4)  # which makes large logits
        sizes[name, error] = both_ways(model, torch.randn(4, 64, 64), error=error, most=most)[1]
    assert sizes["einsum", "coarse"] == sizes["@", "coarse"] < sizes["@", "rounding"]
