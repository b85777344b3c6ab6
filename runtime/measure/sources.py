"""Where models come from: transformers, timm, or a function of the user. Nothing is downloaded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from fitact.base import UsageError, integer, near, one_line, quote
from fitact.runtime.restore import Inputs, runner

from .prepare import imported
from .subjects import Example, Source

HEADS = {
    "none": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}


def hugging_face(
    kind: str,
    sizes: Mapping[str, Any] | None = None,
    *,
    head: str | None = None,
    attention: str | None = None,
    image: int | None = None,
) -> Source:
    """Return a model of transformers with random weights, from a configuration; nothing is downloaded.

    Args:
        kind: model type, e.g. `"llama"`; its default configuration has the sizes of a well-known model.
        sizes: changes of that configuration, e.g. `{"num_hidden_layers": 24}`.
        head: one of HEADS. By default `"causal-lm"` for decoders, `"sequence"` for other text models, `"image"`
            for image models, and none for others. With a head the loss is computed, and what it saves is counted.
        attention: `"sdpa"` (fused) or `"eager"` (composed of operations); by default fused where the model has it.
        image: height and width of images in pixels; by default the configuration's, or 224.

    Raises:
        UsageError: transformers is missing, or has no such type or size.

    """
    sizes = dict(sizes or {})
    image = None if image is None else integer("image", image, 1)
    transformers = imported("transformers")
    transformers.logging.set_verbosity_error()
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        raise UsageError(f"transformers has no model type {quote(kind)}{near(kind, known)}")
    try:
        defaults = transformers.AutoConfig.for_model(kind)
    except Exception as error:
        raise UsageError(f"{kind}: cannot be built: {one_line(error)}") from error
    for key in sizes:
        if not hasattr(defaults, key):
            raise UsageError(f"{kind}: its configuration has no {quote(key)}{near(key, list(defaults.to_dict()))}")
    if head is None:
        head = _usual_head(kind)
    if head not in HEADS:
        raise UsageError(f"no head {quote(head)}: expected {', '.join(HEADS)}")

    def build(batch: int, seq: int) -> Example:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if image is not None:
            config.image_size = image
        auto = getattr(transformers, HEADS[head])
        try:
            model = auto.from_config(config, attn_implementation=attention or "sdpa")
        except ValueError:
            if attention is not None:
                raise
            model = auto.from_config(config, attn_implementation="eager")
        return model, _transformers_inputs(head, model, batch, seq)

    images = head == "image" or _does(kind, "IMAGE_CLASSIFICATION")
    varies = frozenset(("batch",) if images else ("batch", "seq"))
    return Source(kind, build, varies, _positions)


def _does(kind: str, task: str) -> bool:
    """Whether transformers has a model of a type for a task."""
    auto = import_module("transformers.models.auto.modeling_auto")
    return kind in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES")


def _usual_head(kind: str) -> str:
    masked = _does(kind, "MASKED_LM")
    if _does(kind, "CAUSAL_LM") and not masked:
        return "causal-lm"
    if masked and _does(kind, "SEQUENCE_CLASSIFICATION"):
        return "sequence"
    return "image" if _does(kind, "IMAGE_CLASSIFICATION") else "none"


def _transformers_inputs(head: str, model: Any, batch: int, seq: int) -> Inputs:
    config = model.config
    given: dict[str, Tensor] = {}
    if model.main_input_name == "input_ids":
        given["input_ids"] = torch.zeros(batch, seq, dtype=torch.long)
        if config.is_encoder_decoder:
            given["decoder_input_ids"] = torch.zeros(batch, seq, dtype=torch.long)
        labels = torch.zeros((batch,) if head == "sequence" else (batch, seq), dtype=torch.long)
    elif model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        given["pixel_values"] = torch.zeros(batch, getattr(config, "num_channels", 3), height, width)
        labels = torch.zeros(batch, dtype=torch.long)
    else:
        raise UsageError(
            f"{config.model_type}: fitact does not know its inputs, {model.main_input_name}; give a callable that "
            "returns the model and its inputs"
        )
    if head != "none":
        given["labels"] = labels
    return Inputs((), given)


def _positions(model: nn.Module) -> int | None:
    """Return for how many positions a model has learned embeddings; None if it has none."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and leaf in ("position_embeddings", "wpe", "embed_positions"):
            offset = getattr(module, "offset", 0)  # of OPT and BART; RoBERTa's positions begin after its padding
            return module.num_embeddings - (offset or (module.padding_idx or -1) + 1)
    return None


def timm_model(name: str, *, image: int | None = None) -> Source:
    """Return a model of timm with random weights; nothing is downloaded.

    Args:
        name: as in `timm.create_model`.
        image: height and width of images, in pixels; by default what the model was trained for.

    Raises:
        UsageError: timm is missing, or has no such model.

    """
    image = None if image is None else integer("image", image, 1)
    timm = imported("timm")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {quote(name)}{near(name, timm.list_models())}")

    def build(batch: int, seq: int) -> Example:
        try:
            model = timm.create_model(name, pretrained=False, **({"img_size": image} if image else {}))
        except TypeError:  # most models take images of any size
            model = timm.create_model(name, pretrained=False)
        channels, height, width = model.pretrained_cfg["input_size"]
        return model, Inputs((torch.zeros(batch, channels, image or height, image or width),))

    return Source(name, build, frozenset(("batch",)))


def from_callable(call: Callable[..., Any] | str) -> Source:
    """Return a source that calls a user's function for a model and its inputs.

    Args:
        call: the function, or its place, `"module:function"`. It may take arguments `batch` and `seq`, and returns
            the model and a tensor, a tuple of positional or a dictionary of named arguments. It is called on
            PyTorch's meta device, where tensors take no memory, and on the CPU if that fails.

    Raises:
        UsageError: there is no such function.

    """
    name, varies, made = _named(call)

    def build(batch: int, seq: int) -> Example:
        try:
            result = made(batch, seq)
        except UsageError:
            with torch.device("cpu"):
                result = made(batch, seq)
        match result:
            case (nn.Module() as model, (Tensor() | tuple() | list() | dict()) as inputs):
                return model, cast("Inputs", runner(inputs))
        raise UsageError(f"{name}: expected a model and its inputs, got {quote(result)}")

    return Source(name, build, varies)


def model_and_batches(call: str, batch: int, seq: int) -> tuple[nn.Module, Iterable[Any]]:
    """Call a user's function for a model with values and for batches of inputs.

    Its place is `"module:function"`. It gets `batch` and `seq` if it takes them, and returns the model and the
    inputs, as for `from_callable`; or the model and any other iterable, such as a generator or a DataLoader, of
    inputs.

    Raises:
        UsageError: there is no such function, it fails, or it returns something else.

    """
    name, _, made = _named(call)
    result = made(batch, seq)
    match result:
        case (nn.Module() as model, (Tensor() | tuple() | list() | dict()) as inputs):
            return model, [inputs]
        case (nn.Module() as model, Iterable() as batches) if not isinstance(batches, (str, bytes)):
            return model, batches
    raise UsageError(
        f"{name}: expected a model and its inputs, or a model and several batches, got {quote(result)}"
    )


def _named(call: Callable[..., Any] | str) -> tuple[str, frozenset[str], Callable[[int, int], Any]]:
    """Return a function's name, which of `"batch"` and `"seq"` it takes, and what calls it with these."""
    name = call if isinstance(call, str) else getattr(call, "__qualname__", type(call).__name__)
    function = _function(call) if isinstance(call, str) else call
    try:
        varies = frozenset(inspect.signature(function).parameters) & {"batch", "seq"}
    except (TypeError, ValueError):
        varies = frozenset()

    def made(batch: int, seq: int) -> Any:
        sizes = {"batch": batch, "seq": seq}
        try:
            return function(**{size: sizes[size] for size in varies})
        except (Exception, SystemExit) as error:
            raise UsageError(f"{name}: it failed: {one_line(error)}") from error

    return name, varies, made


def _function(place: str) -> Any:
    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise UsageError(f"{quote(place)}: expected MODULE:CALLABLE, such as my_models:tiny")
    with mock.patch.object(sys, "path", ["", *sys.path]):
        try:
            module = import_module(module_name)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{module_name}: cannot be imported: {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{module_name}: it has no callable {quote(name)}{near(name, there)}")
    return function
