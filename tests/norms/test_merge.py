"""Norms merged into the linear layers that follow: outputs, gradients, kept bytes, refusals, and the way back."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.errors import JobError, UsageError
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.models.prepare import imported
from fitact.runtime.norms.fold import merge_norms, unmerge_norms
from fitact.runtime.norms.linear import Norm, recognise
from fitact.runtime.norms.modules import MSLayerNorm, MSRMSNorm
from fitact.runtime.records import SiteRecord

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = SIZES | {"vocab_size": 50, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
MAMBA = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
Example = tuple[nn.Module, Any]


def hugging_face(name: str, **sizes: Any) -> Callable[[], Example]:
    def build() -> Example:
        transformers = imported("transformers")
        kind = name.removesuffix("LMHeadModel").partition("For")[0]
        model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))
        if model.main_input_name == "pixel_values":
            return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
        inputs = {"input_ids": torch.randint(3, 50, (2, 9))}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(3, 50, (2, 7))
        return model, inputs

    return build


def timm_vit() -> Example:
    vit = imported("timm").models.VisionTransformer
    model = vit(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5)
    return model, (torch.randn(2, 3, 16, 16),)


DROPOUT, TIED = "Dropout reads its output", "its weight is tied to"
# What each model is, how many norms are merged, and why the others are not.
MODELS: dict[str, tuple[Callable[[], Example], int, list[str]]] = {
    "bert": (
        hugging_face("BertForMaskedLM", vocab_size=50, **SIZES),
        1,  # the last one, which the head reads; all others feed a residual sum too
        [DROPOUT, "add in BertOutput", "add in BertSelfOutput", "add in BertOutput", TIED],
    ),
    "roberta": (
        hugging_face("RobertaForSequenceClassification", vocab_size=50, **SIZES),
        0,
        [DROPOUT, "add in RobertaOutput", "add in RobertaSelfOutput", "add in RobertaOutput", DROPOUT],
    ),
    "gpt2": (hugging_face("GPT2LMHeadModel", vocab_size=50, **GPT2), 4, [TIED]),
    "vit": (hugging_face("ViTForImageClassification", image_size=16, patch_size=8, **SIZES), 5, []),
    "llama": (hugging_face("LlamaForCausalLM", **GROUPED), 5, []),
    "mistral": (hugging_face("MistralForCausalLM", **GROUPED), 5, []),
    "qwen2": (hugging_face("Qwen2ForCausalLM", **GROUPED), 5, []),
    "qwen3": (
        hugging_face("Qwen3ForCausalLM", head_dim=8, **GROUPED),
        5,
        ["mul in Qwen3Attention"] * 4,
    ),
    "gemma": (hugging_face("GemmaForCausalLM", head_dim=8, **GROUPED), 4, [TIED]),
    "t5": (hugging_face("T5ForConditionalGeneration", vocab_size=50, **T5), 10, [DROPOUT] * 2),
    "neox": (hugging_face("GPTNeoXForCausalLM", vocab_size=50, **SIZES), 5, []),
    "nemotron": (hugging_face("NemotronForCausalLM", **GROUPED), 5, []),  # β, and no layer has a bias
    "mamba": (hugging_face("MambaForCausalLM", state_size=4, **MAMBA), 2, [TIED]),
    "mamba2": (
        hugging_face(
            "Mamba2ForCausalLM", state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8, **MAMBA
        ),
        3,
        ["it is not called with one positional argument"] * 2,  # but with a gate
    ),
    "timm_vit": (timm_vit, 5, []),
}


def build(name: str) -> Example:
    """A tiny model in evaluation, with α between 0.3 and 1.7 and normal β."""
    model, inputs = MODELS[name][0]()
    randomise(model)
    return model.eval(), inputs


def randomise(model: nn.Module) -> None:
    with torch.no_grad():
        for module in model.modules():
            known = recognise(module)
            if isinstance(known, Norm):
                if known.weight is not None:
                    known.weight.uniform_(0.3, 1.7).sub_(known.offset)
                if known.bias is not None:
                    known.bias.normal_()


def in_double(model: nn.Module, inputs: Any) -> Any:
    """Make all of a model float64: the RMSNorms of transformers, which compute in float32, become PyTorch's."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            known = recognise(child)
            if isinstance(known, Norm) and not known.centred:
                made = nn.RMSNorm(known.columns, known.eps)
                made.weight.data.copy_(known.alpha)
                setattr(module, name, made)
    model.double()
    convert = lambda x: x.double() if x.is_floating_point() else x  # noqa: E731
    return {k: convert(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(convert, inputs))


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return result if isinstance(result, Tensor) else result.logits


def distance(a: Tensor, b: Tensor) -> float:
    """In the 2-norm, relative."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def kept(model: nn.Module, inputs: Any) -> int:
    model.train()
    with count_saved(model) as saved:
        outputs(model, inputs)
    model.eval()
    return saved.bytes


def merged(sites: list[SiteRecord]) -> list[SiteRecord]:
    return [site for site in sites if site.after is not None]


def reason(sites: list[SiteRecord]) -> str:
    (site,) = sites
    assert site.after is None and site.kept_after == site.kept_before
    return site.reason


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Every norm is merged or left alone for the expected reason; the same outputs; fewer bytes, as foretold."""
    model, inputs = build(name)
    before, bytes_before = outputs(model, inputs).detach(), kept(model, inputs)
    norms = [path for path, module in model.named_modules() if isinstance(recognise(module), Norm)]
    sites = merge_norms(model, inputs)
    assert [site.name for site in sites] == norms
    done = merged(sites)
    assert len(done) == MODELS[name][1]
    left = [site.reason for site in sites if site.after is None]
    assert len(left) == len(MODELS[name][2])
    assert all(part in text for part, text in zip(MODELS[name][2], left, strict=True)), left
    assert distance(outputs(model, inputs), before) < 2e-6
    assert sum(site.kept_before - site.kept_after for site in sites) == bytes_before - kept(model, inputs)
    for site in done:
        assert site.after == type(model.get_submodule(site.name)).__name__
        assert site.shared and site.kept_after < site.kept_before


# Not Mamba-2, whose gated norms compute in float32.
@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][1] and name != "mamba2"])
def test_in_float64_outputs_and_gradients(name: str) -> None:
    """To 1e-10. A merged layer has W̃ = W·diag(α) and b̃ = b + Wβ, so dW = dW̃·diag(α) + db̃·βᵀ."""
    model, inputs = build(name)
    inputs = in_double(model, inputs)
    original = copy.deepcopy(model)
    sites = merge_norms(model, inputs)
    assert len(merged(sites)) == MODELS[name][1]
    expected, result = outputs(original, inputs), outputs(model, inputs)
    assert distance(result, expected) < 1e-12
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (result * weights).sum().backward()
    records = [module.merged for module in model.modules() if getattr(module, "merged", None)]
    by_layer = {id(layer): record.norm for record in records for layer in record.layers}
    stock = dict(original.named_parameters())
    compared = 0
    for path, parameter in model.named_parameters():
        owner, _, kind = path.rpartition(".")
        layer = model.get_submodule(owner)
        if path not in stock:  # a bias that came with β
            continue
        gradient, reference = parameter.grad, stock[path].grad
        if reference is None:
            assert gradient is None
            continue
        norm = by_layer.get(id(layer))
        if norm is not None and kind == "weight":
            if type(layer).__name__ == "Conv1D":
                gradient, reference = gradient.t(), reference.t()
            gradient = gradient * norm.alpha
            if norm.beta is not None:
                gradient = gradient + torch.outer(layer.bias.grad, norm.beta)
        scale = float(reference.abs().max()) + float(expected.detach().abs().max())
        assert float((gradient - reference).abs().max()) < 1e-10 * scale, path
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "timm_vit"])
def test_undone(name: str) -> None:
    model, inputs = build(name)
    text, state = repr(model), copy.deepcopy(model.state_dict())
    before = outputs(model, inputs).detach()
    sites = merge_norms(model, inputs)
    assert unmerge_norms(model) == [site.name for site in merged(sites)]
    assert repr(model) == text
    assert list(model.state_dict()) == list(state)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=2.5e-7, atol=1e-6 if key.endswith("bias") else 0)
    assert distance(outputs(model, inputs), before) < 2e-6
    assert len(merged(merge_norms(model, inputs))) == len(merged(sites))
    assert unmerge_norms(nn.Linear(2, 2)) == []


class Block(nn.Module):
    """A norm, a path, and layers that read what comes out of it."""

    def __init__(
        self,
        norm: nn.Module | None = None,
        path: Callable[[Tensor], Tensor] = lambda x: x,
        layers: list[nn.Module] | None = None,
        end: Callable[[Tensor, Tensor], Any] = lambda x, y: y,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8) if norm is None else norm
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)] if layers is None else layers)
        self.path, self.end = path, end
        randomise(self)

    def forward(self, x: Tensor) -> Any:
        z = self.norm(self.first(x))
        given = self.path(z)
        total: Any = 0
        for layer in self.layers:
            total = total + layer(given)
        return self.end(z, total)


X = torch.linspace(-2, 2, 3 * 4 * 8).sin().view(3, 4, 8)


def check(model: nn.Module, x: Any = X, count: int = 1) -> list[SiteRecord]:
    """Merge, expecting the same outputs."""
    with torch.no_grad():
        before = model.eval()(x)
        sites = merge_norms(model, x)
        assert len(merged(sites)) == count, [site.reason for site in sites]
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    return sites


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda z: z.view(-1, 8),
    "reshape": lambda z: z.reshape(2, 6, 8),
    "one token": lambda z: z[:, 0],
    "every other": lambda z: z[:, ::2],
    "flattened and split": lambda z: z.flatten().unflatten(0, (-1, 8)),
    "detached shape": lambda z: z + 0 if torch.zeros_like(z).any() else z,
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_of_rows(path: str) -> None:
    model = Block(path=PATHS[path])
    (site,) = check(model)
    assert site.after == "MSLayerNorm" and site.reason == "merged into layers.0, layers.1"


ROWS, COPY = "its inputs are not the rows", "clone in Block reads its output"
MIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "tokens as features": (lambda z: z.view(-1, 8)[:8].t(), ROWS),
    "shifted": (lambda z: z.flatten()[4:-4].view(-1, 8), ROWS),
    "interleaved": (lambda z: z.flatten()[::2].view(-1, 8), ROWS),
    "split": (lambda z: z.view(-1, 4, 2).transpose(1, 2).reshape(-1, 8), COPY),
    "rows exchanged, of which a layer makes a copy": (lambda z: z.transpose(0, 1), "keeping a copy of its output"),
}


@pytest.mark.parametrize("path", MIXED)
def test_paths_that_mix_features_are_refused(path: str) -> None:
    change, words = MIXED[path]
    assert words in reason(check(Block(path=change), count=0))


def test_layers_without_bias_and_norms_without_affine() -> None:
    for norm in (
        nn.LayerNorm(8),
        nn.LayerNorm(8, bias=False),
        nn.LayerNorm(8, elementwise_affine=False),
        nn.RMSNorm(8),
        nn.RMSNorm(8, eps=1e-3, elementwise_affine=False),
    ):
        model = Block(norm, layers=[nn.Linear(8, 8, bias=False), nn.Linear(8, 8)])
        check(model)
        has_beta = getattr(norm, "bias", None) is not None
        assert (model.layers[0].bias is not None) == has_beta
        assert not list(model.norm.parameters())
        unmerge_norms(model)
        assert model.norm is norm and model.layers[0].bias is None


def test_a_norm_of_several_calls_and_places() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)
            self.again = self.norm
            randomise(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.again(self.layer(self.norm(x))))

    model = Twice()
    (site,) = check(model)
    assert isinstance(model.norm, MSLayerNorm) and model.again is model.norm
    assert site.kept_after == 4 * 12  # of the second call: the first one's input needs no gradient


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.tokens(x)))


class Two(nn.Module):
    """Two norms, with layers of their own or with one for both."""

    def __init__(self, shared_weight: bool, shared_layer: bool) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(8), nn.LayerNorm(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        if shared_weight:
            self.two.weight = self.one.weight
        self.second = 0 if shared_layer else 1
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.one(x)) + self.layers[self.second](self.two(x))


def zero() -> nn.Module:
    model = Block()
    model.norm.weight.data[3] = 0
    return model


def frozen() -> nn.Module:
    model = Block()
    model.layers.requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = Block()
    model.norm.register_forward_hook(lambda *_: None)
    return model


def replaced() -> nn.Module:
    model = Block()
    model.norm.forward = model.norm.forward  # as accelerate does
    return model


def changed_input() -> nn.Module:
    model = Block()
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


def weight_normed() -> nn.Module:
    model = Block()
    nn.utils.parametrizations.weight_norm(model.layers[0])
    return model


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def computed_bias() -> nn.Module:
    model = Block()
    nn.utils.parametrize.register_parametrization(model.layers[1], "bias", Doubled())
    return model


def overflowing() -> nn.Module:
    """In one column, and only to −∞, which ReLU hides."""
    model = Block(end=lambda z, y: y.relu()).half()
    model.norm.weight.data[2] = 3e4
    model.layers[0].weight.data[:, 2] = -3
    return model


def underflowing() -> nn.Module:
    """In one column, of which dividing by α again would leave nothing."""
    model = Block().half()
    model.norm.weight.data[2] = 1e-7
    return model


class Collecting(Block):
    """Its output is held by a hook, as feature extractors do, or as an attribute, in training."""

    def __init__(self, hook: bool) -> None:
        super().__init__()
        self.hook, self.seen = hook, []
        if hook:
            self.layers[0].register_forward_hook(lambda module, args, y: self.seen.append(args[0][:, 0]))

    def forward(self, x: Tensor) -> Any:
        self.seen.clear()
        if self.hook:
            return super().forward(x)
        z = self.norm(self.first(x))
        if self.training:
            self.seen.append(z)
        return self.layers[0](z)


class Branches(nn.Module):
    """One of two norms, followed by one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        randomise(self)

    def forward(self, x: Tensor, layer: int = 0, norm: int = 0) -> Tensor:
        return self.layers[layer](self.norms[norm](self.first(x)))


class OwnRMS(nn.Module):
    """As Gemma's, under a name of its own."""

    def __init__(self, power: float = 0.5, outside: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(8))
        self.epsilon, self.power, self.outside = 1e-4, power, outside

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().mean(-1, keepdim=True)
        if self.outside:
            return x / (square.sqrt() + self.epsilon) * (1 + self.gain)
        return x * (square + self.epsilon) ** -self.power * (1 + self.gain)


class NamedInput(OwnRMS):
    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(hidden if residual is None else hidden + residual)


class CallsByName(Block):
    def __init__(self, residual: bool) -> None:
        super().__init__(NamedInput())
        self.residual = residual

    def forward(self, x: Tensor) -> Any:
        z = self.norm(self.first(x), x) if self.residual else self.norm(hidden=self.first(x))
        return self.layers[0](z)


class Quantised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.round(), self.bias)


class Elsewhere(Block):
    """Reads a layer with something else, too, or its weight alone."""

    def __init__(self, weight_alone: bool) -> None:
        super().__init__()
        self.weight_alone = weight_alone

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (F.linear(x, self.layers[0].weight) if self.weight_alone else self.layers[0](x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return self.attention(z, z, z, need_weights=False)[0]


class Widening(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual sum": (lambda: Block(end=lambda z, y: y + z), r"add in Block reads its output"),
    "output": (lambda: Block(end=lambda z, y: (y, {"hidden": z})), "one of the model's"),
    "view of it is output": (lambda: Block(end=lambda z, y: [y, z[0].t()]), "one of the model's"),
    "changed in place": (lambda: Block(path=lambda z: z.mul_(2)), "mul_ in Block reads"),
    "copy": (lambda: Block(path=lambda z: z.transpose(0, 1).contiguous()), "clone in Block reads"),
    "dropout": (lambda: Block(path=nn.Dropout(0.1)), "Dropout reads"),
    "functional dropout": (lambda: Block(path=lambda z: F.dropout(z, 0.1)), "in Block reads"),
    "noise in training": (lambda: Block(path=Noise()), "add in Noise reads"),
    "convolution": (lambda: Block(layers=[nn.Linear(8, 8), Convolution()]), "Conv1d reads"),
    "activation": (lambda: Block(path=nn.GELU()), "GELU reads"),
    "attention of PyTorch": (Attention, "MultiheadAttention reads"),
    "no layer": (lambda: Block(layers=[], end=lambda z, y: X), "no linear layer reads"),
    "fed from elsewhere": (lambda: Elsewhere(False), "layers.0: it reads something else too"),
    "weight read outside": (lambda: Elsewhere(True), "layers.0: its parameters are read outside"),
    "tied": (Tied, "head: its weight is tied to tokens"),
    "alpha is 0": (zero, r"α is 0 in 1 of 8 places"),
    "frozen": (frozen, "nothing would be shared"),
    "hooks": (hooked, "it has hooks"),
    "replaced forward": (replaced, "its forward is replaced"),
    "pre-hooks of a layer": (changed_input, "layers.1: it has forward pre-hooks"),
    "computed weight": (weight_normed, "layers.0: its weight is computed"),
    "computed bias": (computed_bias, "layers.1: its bias is computed"),
    "overflow": (overflowing, "layers.0: its weight times α would overflow"),
    "underflow": (underflowing, "layers.0: its weight times α would be too small for torch.float16"),
    "held by a hook": (lambda: Collecting(True), "held after the run"),
    "held as an attribute": (lambda: Collecting(False), "held after the run"),
    "input by name": (lambda: CallsByName(False), "it is not called with one positional argument"),
    "second input": (lambda: CallsByName(True), "it is not called with one positional argument"),
    "quantised": (lambda: Block(layers=[Quantised(8, 8)]), "layers.0: it is a Quantised"),
    "another dtype": (lambda: Block(Widening(8, eps=1e-5), layers=[nn.Linear(8, 8).double()]), "another dtype"),
    "two dimensions": (lambda: Block(nn.LayerNorm((4, 8))), "normalises over 2 dimensions"),
}


class Noise(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z + torch.randn_like(z) if self.training else z


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.conv(z.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, words = REFUSED[case]
    model = make()
    inputs = torch.arange(12).view(3, 4) if case == "tied" else X.to(next(model.parameters()).dtype)
    state = copy.deepcopy(model.state_dict())
    sites = merge_norms(model, inputs)
    assert words in reason(sites)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(module, (MSLayerNorm, MSRMSNorm)) for module in model.modules())


@pytest.mark.parametrize(
    ("shared_weight", "shared_layer", "words"),
    [(True, False, "its parameters are shared with"), (False, True, "several norms meet there: one, two")],
)
def test_two_norms_refused(shared_weight: bool, shared_layer: bool, words: str) -> None:
    sites = merge_norms(Two(shared_weight, shared_layer), X)
    assert [words in site.reason for site in sites] == [True, True]


def test_what_the_example_does_not_run() -> None:
    """An idle layer might read the output too, an idle norm feed the layer; elsewhere they may be idle."""

    def both_layers(model: nn.Module) -> list[Tensor]:
        return [model(X, 0), model(X, 1)]

    model = Branches()
    sites = merge_norms(model, both_layers)
    assert "norms.1 does not run on the example inputs, but may feed the same layers" in sites[0].reason
    assert "no linear layer reads" in sites[1].reason
    del model.norms[1]
    (site,) = merge_norms(model, X)
    assert "layers.1 does not run on the example inputs, but may read its output" in site.reason
    before = [one.detach() for one in both_layers(model)]
    (site,) = merge_norms(model, both_layers)
    assert site.reason == "merged into layers.0, layers.1"
    for one, reference in zip(both_layers(model), before, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)
    outside = nn.Sequential(Block(), nn.Linear(8, 8))
    outside.idle = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
    outside.forward = lambda x: outside[1](outside[0](x))
    sites = merge_norms(outside, X)
    assert [site.name for site in merged(sites)] == ["0.norm"]
    model = Branches()
    model.norms[0] = nn.LayerNorm(8, elementwise_affine=False)  # there is nothing to merge
    assert len(merged(merge_norms(model, X))) == 1


def test_partly_frozen_layers_are_merged() -> None:
    """One of two layers keeps the norm's output, so it is shared; the frozen one is scaled too."""
    model = Block()
    model.layers[0].requires_grad_(False)
    check(model)
    assert not model.layers[0].weight.requires_grad


def test_norms_are_recognised_by_what_they_compute() -> None:
    known = recognise(OwnRMS())
    assert isinstance(known, Norm) and (known.centred, known.offset, known.eps) == (False, 1.0, 1e-4)
    check(Block(OwnRMS()))
    assert recognise(OwnRMS(power=0.6)) is None
    assert recognise(OwnRMS(outside=True)) is None
    assert recognise(nn.GroupNorm(1, 8)) is None
    assert recognise(nn.BatchNorm1d(8)) is None
    named = type("SquareRMSNorm", (OwnRMS,), {})(power=1.0)
    assert "does not compute z·w" in str(recognise(named))
    assert "does not compute" in reason(merge_norms(Block(named), X))
    timm = imported("timm").layers
    assert "of the last dimension" in str(recognise(timm.LayerNorm2d(8)))
    for norm in (timm.LayerNorm(8), timm.RmsNorm(8)):
        known = recognise(norm)
        assert isinstance(known, Norm) and known.centred == isinstance(norm, timm.LayerNorm)


def test_recognising_leaves_the_module_alone() -> None:
    norm = OwnRMS().train()
    state = torch.get_rng_state()
    recognise(norm)
    assert norm.training and torch.equal(norm.gain, torch.zeros(8))
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_else_is_touched() -> None:
    """Training flags, buffers, random state, gradients; and in a dry run everything."""

    class Stateful(Block):
        def __init__(self) -> None:
            super().__init__()
            self.batch, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            random.random()
            return self.dropout(self.batch(super().forward(x).flatten(0, 1)))

    model = Stateful().train()
    model.dropout.eval()
    model.layers[0].weight.grad = torch.ones(8, 8)
    flags = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    buffers = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    parameters = {name: (id(one), one.detach().clone()) for name, one in model.named_parameters()}
    for dry_run in (True, False):
        (site,) = merge_norms(model, X, dry_run=dry_run)
        assert site.after == "MSLayerNorm" and site.kept_after == 48
        assert [module.training for module in model.modules()] == flags
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        for name, (identity, value) in buffers.items():
            assert id(model.get_buffer(name)) == identity and torch.equal(model.get_buffer(name), value)
        assert torch.equal(model.layers[0].weight.grad, torch.ones(8, 8))
        if dry_run:
            assert type(model.norm) is nn.LayerNorm
            for name, one in model.named_parameters():
                assert id(one) == parameters[name][0] and torch.equal(one, parameters[name][1])
    assert isinstance(model.norm, MSLayerNorm) and model.norm.training
    assert "norm.weight" not in model.state_dict()


def test_what_is_not_seen_is_found_by_the_outputs() -> None:
    """Memory that is read behind PyTorch's back: the outputs differ, and everything is as it was, bit for bit."""

    def hidden(z: Tensor, y: Tensor) -> Tensor:
        return y + torch.from_numpy(z.detach().numpy()).clone()

    model = Block(end=hidden, layers=[nn.Linear(8, 8, bias=False)])
    norm, state = model.norm, copy.deepcopy(model.state_dict())
    with pytest.raises(
        JobError, match=r"after merging 1 norms the outputs differ by \S+, more than the .* rounding"
    ):
        merge_norms(model, X)
    assert model.norm is norm and model.layers[0].bias is None
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


class Fragile(Block):
    """Raises an error if its norm is not PyTorch's."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Any:
        if not isinstance(self.norm, nn.LayerNorm):
            raise self.error("no such\nnorm")
        return super().forward(x)


@pytest.mark.parametrize(("error", "raised"), [(OSError, JobError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_an_error_leaves_nothing_half_merged(error: type[BaseException], raised: type[BaseException]) -> None:
    """An error of the model becomes one that names the norms of the module that could not do without them."""
    model = nn.Sequential(Block(), Fragile(error), Block())
    state, norms = copy.deepcopy(model.state_dict()), [part.norm for part in model]
    with pytest.raises(raised, match="no such") as found:
        merge_norms(model, X)
    if raised is JobError:
        assert str(found.value) == (
            "with its norms merged the model does not run, OSError: no such norm: all was undone; exclude 1.norm"
        )
        assert [site.after is None for site in merge_norms(model, X, exclude="1.norm", dry_run=True)] == [0, 1, 0]
    assert [part.norm for part in model] == norms
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_include_and_exclude() -> None:
    model, inputs = build("vit")
    sites = merge_norms(model, inputs, include=["*layernorm_*"], exclude="vit.layers.1.*", dry_run=True)
    reasons = {site.name: site.reason for site in sites}
    assert len(merged(sites)) == 2
    assert reasons["vit.layers.1.layernorm_after"] == "left out: a pattern of exclude matches"
    assert reasons["vit.layernorm"] == "left out: no pattern of include matches"


@pytest.mark.parametrize(
    "inputs", [X, (X,), {"x": X}, lambda model: model(X)], ids=["tensor", "tuple", "dict", "call"]
)
def test_kinds_of_inputs(inputs: Any) -> None:
    assert len(merged(merge_norms(Block(), inputs))) == 1


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match=r"does not run on the example inputs in training: RuntimeError: "):
        merge_norms(Block(), torch.ones(3))
    with pytest.raises(UsageError, match=r"example_inputs 3: expected a tensor, a tuple or a mapping"):
        merge_norms(Block(), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not compiled"):
        merge_norms(torch.compile(Block()), X)  # type: ignore[arg-type]
    distributed = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(distributed)  # without a process group
    with pytest.raises(UsageError, match="not yet spread over processes"):
        merge_norms(nn.Sequential(distributed, Block()), X)
    with torch.device("meta"):
        empty = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    with pytest.raises(UsageError, match=r"parameters with values, got 0\.weight"):
        merge_norms(empty, X)
    with pytest.raises(UsageError, match="no numbers to compare"):
        merge_norms(Block(end=lambda z, y: None), X)
    assert merge_norms(nn.Linear(8, 8), X) == []
    assert "one of the model's" in reason(merge_norms(nn.LayerNorm(8), X))


def test_autocast_shares_the_cast_output() -> None:
    """Two layers keep the norm's output, in bfloat16, and no copies."""
    model = Block()
    model.first = nn.Identity()
    x = X.clone().requires_grad_()

    def run(model: nn.Module) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    with count_saved(model) as before:
        run(model)
    (site,) = merge_norms(model, run)
    assert site.after == "MSLayerNorm" and isinstance(model.norm, MSLayerNorm)
    with count_saved(model) as after:
        run(model)
    half = X.numel() * 2
    # before: x in float32, mean and 1/σ, and each layer its own copy; now z and 1/σ
    assert before.bytes - after.bytes == (2 * half + 2 * 48 + 2 * half) - (half + 48)


QUICK = ("gpt2", "llama", "neox", "nemotron", "timm_vit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MODELS]
)
def test_merged_and_unmerged_in_autocast(name: str) -> None:
    """Weights and biases to the bit as without autocast, which has no old casts of them left either."""
    stock, inputs = build(name)
    state, before = stock.state_dict(), outputs(stock, inputs).detach()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with autocast:  # where a model casts what a norm returns, fewer are merged
        names = [site.name for site in merged(merge_norms(stock, inputs, dry_run=True))]
        cast = outputs(stock, inputs).detach()
    plain = copy.deepcopy(stock)
    merge_norms(plain, inputs, include=names)
    reference = {key: value.clone() for key, value in plain.state_dict().items()}
    unmerge_norms(plain)
    expected = {nullcontext: (before, 2e-6), torch.autocast: (cast, 0.05)}
    for merging, undoing in itertools.product((nullcontext(), autocast), repeat=2):
        model = copy.deepcopy(stock)
        with merging:
            outputs(model, inputs)
            assert [site.name for site in merged(merge_norms(model, inputs, include=names))] == names
            result = outputs(model, inputs)
        reached, limit = expected[type(merging)]
        assert distance(result, reached) < limit
        assert distance(outputs(model, inputs), before) < 2e-6
        torch.testing.assert_close(model.state_dict(), reference, rtol=0, atol=0)
        with undoing:
            outputs(model, inputs)
            unmerge_norms(model)
            result = outputs(model, inputs)
        reached, limit = expected[type(undoing)]
        assert distance(result, reached) < limit
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
        assert list(model.state_dict()) == list(state)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, state[key], rtol=2.5e-7, atol=1e-6 if key.endswith("bias") else 0)


def test_weights_that_autocast_could_not_cast_any_more() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight[2] = 7e3
        model[1].weight[:, 2] = 10
    assert len(merged(merge_norms(model, X, dry_run=True))) == 1
    with torch.autocast("cpu", dtype=torch.float16):
        assert model(X).isfinite().all()
        assert "its weight times α would overflow" in reason(merge_norms(model, X))


def test_trained_in_float16_with_scaled_gradients() -> None:
    """Gradients are those of the unmerged model by the chain rule; a scale that overflows is noticed as ever."""
    stock = Block().train()
    model = copy.deepcopy(stock)
    with torch.autocast("cpu", dtype=torch.float16):
        assert len(merged(merge_norms(model, X))) == 1
    gradients = []
    for scale, one in itertools.product((2.0**12, 2.0**40), (stock, model)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = one(X).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) == (scale > 2.0**20)
        gradients.append(one.first.weight.grad.clone())
    assert distance(gradients[1], gradients[0]) < 0.01


def test_unmerging_in_autocast_uses_no_old_casts() -> None:
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64))
    nn.init.normal_(model[0].weight, 1, 0.5)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(x).detach()
    merge_norms(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
        unmerge_norms(model)
        assert distance(model(x), stock) < 0.01


def test_outputs_are_compared_without_the_roundings_of_autocast() -> None:
    """What is wrong by 1 % is not taken for a rounding of bfloat16."""

    def hidden(z: Tensor, y: Tensor) -> Tensor:
        unseen = torch.from_numpy(z.detach().view(torch.uint8).numpy()).clone()
        return y + 0.01 * unseen.view(z.dtype)

    model = Block(end=hidden)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(JobError, match=r"outputs differ by \S+, more than the \S+e-0[56] that rounding explains"),
    ):
        merge_norms(model, X)
    assert isinstance(model.norm, nn.LayerNorm)


def test_a_model_that_needs_autocast() -> None:
    """Its weights are of two dtypes, so it does not run without; its outputs are compared in autocast."""
    model = Block()
    model.layers.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(X).detach()
        (site,) = merge_norms(model, X)
        assert site.after == "MSLayerNorm"
        assert distance(model(X), before) < 0.02
    with pytest.raises(RuntimeError, match="same dtype"):
        model(X)


@pytest.mark.parametrize("added", [False, True])
def test_merged_in_inference_mode(added: bool) -> None:
    """What is seen is the same, and what merging makes can be trained."""
    model = Block(layers=[nn.Linear(8, 8, bias=not added), nn.Linear(8, 8)])
    before = model(X).detach()
    with torch.inference_mode():
        (site,) = merge_norms(model, X)
    assert site.after == "MSLayerNorm"
    assert distance(model(X), before) < 2e-6
    model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.inference_mode():
        unmerge_norms(model)
    model(X).sum().backward()
    assert distance(model(X), before) < 2e-6


def test_trained_and_undone() -> None:
    """A model that was trained while merged computes the same when it is unmerged, biases that came along too."""
    model = Block(layers=[nn.Linear(8, 8, bias=False), nn.Linear(8, 8)]).double()
    x = X.double()
    merge_norms(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    trained = model(x).detach()
    unmerge_norms(model)
    assert distance(model(x), trained) < 1e-12
    assert model.layers[0].bias is not None


class Asking(Block):
    """Reads of its norm what is no output."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        given = x.to(self.norm.gain.device, self.norm.gain.dtype) * self.norm.epsilon * self.norm.gain.numel()
        return self.layers[0](self.norm(given))


def test_what_a_model_asks_of_a_norm_is_still_answered() -> None:
    model = Asking(OwnRMS(), layers=[nn.Linear(8, 8)])
    state = list(model.state_dict())
    check(model)
    assert isinstance(model.norm, MSRMSNorm) and torch.equal(model.norm.gain, torch.zeros(8))
    assert list(model.state_dict()) == [key for key in state if key != "norm.gain"]
    assert not list(model.norm.parameters()) and model.norm.outside is False
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.norm))):
        other.bfloat16()
        assert getattr(other, "norm", other).gain.dtype == torch.bfloat16
    assert model.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
    unmerge_norms(model)
    assert list(model.state_dict()) == state and model.norm.gain.dtype == torch.bfloat16


def test_a_model_that_uses_the_weight_of_a_norm_is_refused() -> None:
    """Its values, as opposed to what they are like."""
    model = Block(end=lambda z, y: y + model.norm.weight)
    assert "its parameters are read outside of it too" in reason(merge_norms(model, X))


def test_copies_and_pickles_can_be_unmerged() -> None:
    model = Block(path=nn.Identity(), end=second)
    before = model(X).detach()
    merge_norms(model, X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.double()
        assert unmerge_norms(other) == ["norm"]
        assert other.norm.weight.dtype == torch.float64
        assert distance(other(X.double()), before) < 1e-6
    assert isinstance(model.norm, MSLayerNorm)


def second(z: Tensor, y: Tensor) -> Tensor:
    return y


# ------------------------------------------------------------------------------------------------------- adapters


def adapted(name: str, targets: list[str], **given: Any) -> Example:
    """A tiny model with adapters whose B is not 0."""
    peft = imported("peft")
    model, inputs = build(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out.*", UserWarning)
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **given)
        return peft.get_peft_model(model, config).eval(), inputs


ADAPTED = {
    "llama": (["q_proj", "v_proj", "up_proj"], 4, 1),
    "gpt2": (["c_attn"], 2, 3),
    "vit": (["q_proj", "fc1"], 4, 1),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters(name: str) -> None:
    targets, count, frozen_or_tied = ADAPTED[name]
    model, inputs = adapted(name, targets)
    before, bytes_before = outputs(model, inputs).detach(), kept(model, inputs)
    sites = merge_norms(model, inputs)
    assert len(merged(sites)) == count and len(sites) == count + frozen_or_tied
    assert distance(outputs(model, inputs), before) < 2e-6
    assert sum(site.kept_before - site.kept_after for site in sites) == bytes_before - kept(model, inputs)
    for _, parameter in model.named_parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter) * parameter.requires_grad)
    trained = outputs(model, inputs).detach()
    unmerge_norms(model)
    assert distance(outputs(model, inputs), trained) < 2e-6
    merge_norms(model, inputs)
    unloaded = model.merge_and_unload()
    assert distance(outputs(unloaded, inputs), trained) < 4e-6
    assert len(unmerge_norms(unloaded)) == count
    assert distance(outputs(unloaded, inputs), trained) < 6e-6


def test_adapters_that_are_refused() -> None:
    for given, words in (
        ({"lora_dropout": 0.1}, "dropout on its input"),
        ({"use_dora": True}, "variant of LoRA"),
    ):
        model, inputs = adapted("vit", ["fc1"], **given)
        sites = {site.name: site.reason for site in merge_norms(model, inputs)}
        assert words in sites["base_model.model.vit.layers.0.layernorm_after"]
    model, inputs = adapted("vit", ["fc1"])
    model.merge_adapter()
    assert any("unmerge it first" in site.reason for site in merge_norms(model, inputs))
    model.unmerge_adapter()
    with model.disable_adapter():
        assert any("adapters are disabled" in site.reason for site in merge_norms(model, inputs))
    peft = imported("peft")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False))
    assert any("several adapters" in site.reason for site in merge_norms(model, inputs))
    assert not any(isinstance(module, MSLayerNorm) for module in model.modules())


def test_two_adapters_after_a_norm_without_beta() -> None:
    """Both are scaled, so either may be active."""
    model, inputs = adapted("llama", ["q_proj", "up_proj"])
    peft = imported("peft")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    before = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        before[name] = outputs(model, inputs).detach()
    assert len(merged(merge_norms(model, inputs))) == 4
    for name in ("default", "other"):
        model.set_adapter(name)
        assert distance(outputs(model, inputs), before[name]) < 2e-6


@pytest.mark.parametrize("part", ["layers.0", "norm"])
def test_modules_that_peft_saves_are_left_alone(part: str) -> None:
    """Both the copy that is trained and the original, which runs with adapters disabled."""
    peft = imported("peft")
    config = peft.LoraConfig(target_modules=["first", "layers.1"], modules_to_save=[part])
    model = peft.get_peft_model(Block(), config)
    for name, parameter in model.named_parameters():
        parameter.data.add_("modules_to_save" in name)
    with model.disable_adapter():
        before = model(X).detach()
    sites = merge_norms(model, X)
    assert not merged(sites) and any("does not run on the example" in site.reason for site in sites)
    with model.disable_adapter():
        assert torch.equal(model(X), before)


def adapted_after_merging(norm: nn.Module, **given: Any) -> nn.Module:
    peft = imported("peft")
    model = Block(norm)
    merge_norms(model, X)
    names = ["layers.0", "layers.1"]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False, **given))


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-5)], ids=["layer", "rms"])
@pytest.mark.parametrize("last", ["keep", "merge", "merge and unload", "unload"])
def test_adapters_added_after_merging_are_unmerged_too(norm: nn.Module, last: str) -> None:
    model = adapted_after_merging(copy.deepcopy(norm)).eval()
    if last == "merge":
        model.merge_adapter()
    elif last != "keep":
        model = model.merge_and_unload() if last == "merge and unload" else model.unload()
    before = model(X).detach()
    assert len(unmerge_norms(model)) == 1
    assert distance(model(X), before) < 2e-6
    if last == "merge":
        model.unmerge_adapter()
        assert distance(model(X), before) < 2e-6


def test_layers_changed_so_that_they_cannot_be_unmerged() -> None:
    """Nothing is changed then; else α and β would be there twice."""
    replaced, computed = Block(), Block()
    for model in (replaced, computed):
        merge_norms(model, X)
    replaced.layers[1] = copy.deepcopy(replaced.layers[1])
    nn.utils.parametrizations.weight_norm(computed.layers[1])
    for model, words in (
        (replaced, "no longer in the model"),
        (computed, "its weight is computed"),
        (adapted_after_merging(nn.LayerNorm(8), use_dora=True), "such as DoRA"),
    ):
        before = model(X).detach()
        with pytest.raises(UsageError, match=f"norm: a layer that took up its α and β .*{words}.*undo that first"):
            unmerge_norms(model)
        assert torch.equal(model(X), before)


def test_layers_in_an_unknown_adapter_are_refused() -> None:
    """(IA)³ scales their output; others add to it when they are enabled again, or are in the weight already."""
    peft = imported("peft")
    for config in (
        peft.IA3Config(target_modules=["layers.0"], feedforward_modules=[]),
        peft.LoHaConfig(target_modules=["layers.0"], init_weights=False),
    ):
        model = peft.get_peft_model(Block(), config)
        model.base_model.model.layers.requires_grad_(True)
        model.merge_adapter()
        (site,) = merge_norms(model, X)
        assert site.after is None and "which may change what it computes" in site.reason


def test_compiled_after_merging() -> None:
    torch._dynamo.reset()
    model = Block()
    merge_norms(model, X)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), model(X))


def test_half_precision() -> None:
    model, inputs = build("llama")
    model.to(torch.bfloat16)
    before = outputs(model, inputs).detach()
    assert len(merged(merge_norms(model, inputs))) == 5
    assert distance(outputs(model, inputs), before) < 0.02
    assert outputs(model, inputs).dtype == torch.bfloat16
