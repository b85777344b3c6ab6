"""A callback for transformers' Trainer, and shipped activations that a configuration can name."""

from __future__ import annotations

import copy
from functools import partial, update_wrapper
from importlib import import_module
from inspect import currentframe
from types import MethodType
from typing import Any

import torch
from torch import nn

from fitact.fitter.catalog import GATES
from fitact.runtime.measure import imported
from fitact.runtime.restore import Inputs
from fitact.runtime.shipped import activation, shipped

from .step import Converting, converted, does_nothing, is_converted, planned

imported("transformers")  # or a UsageError that says how to install it
callbacks: Any = import_module("transformers.trainer_callback")


class FitactCallback(Converting, callbacks.TrainerCallback):
    """Converts the Trainer's model with its own first batch, and logs what that saves.

    The Trainer's loggers get `fitact/saved_before`, `fitact/saved`, `fitact/peak_before` and `fitact/peak` in
    bytes, and `fitact/gradient_error` as a share of the gradient's norm. Peaks are of forward and backward with
    parameters, without the optimizer. The first batch runs in the context already. A warning says so if nothing
    can be saved: in a compiled model, in one that is sharded, or in one that checkpoints all.

    Args:
        error: as for `fitact.convert`; by default `"exact"`.
        plan: in place of an error: a plan of `fitact.plan`, or the file of one, applied when training begins.
        gradients: whether the gradients of the first batch are compared with the baseline's, in a step of each.

    Attributes:
        report: what `fitact.convert` returned; None before the first step, and with a plan.

    Raises:
        UsageError: both an error and a plan are given, or one that is not valid.

    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the plan, or wait for the first batch."""
        model: nn.Module = kwargs["model"]
        caller = getattr(currentframe(), "f_back", None)  # an event does not tell which trainer it is of
        handler = caller.f_locals.get("self") if caller else None

        def log(values: dict[str, float]) -> None:
            """Do what `Trainer.log` does."""
            if values and isinstance(handler, callbacks.CallbackHandler):
                state.log_history.append({**values, "step": state.global_step})
                handler.on_log(args, state, control, values)

        before, self._model = self._model, model
        if is_converted(model, before):
            return
        if args.torch_compile:
            does_nothing("the Trainer compiles the model: convert it before the Trainer is made")
            return
        if self.plan is not None:
            log(planned(model, self.plan))
        else:
            model.forward = _First(self, model, log)


class _First:
    """A model's `forward` until it is called to train, and then converts the model; copies have their own."""

    def __init__(self, callback: FitactCallback, model: nn.Module, log: Any) -> None:
        self.callback, self.model, self.log = callback, model, log
        self.own = vars(model).get("forward")  # accelerate sets one
        self.forward = model.forward
        update_wrapper(self, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the model with the arguments, and run it."""
        model, callback = self.model, self.callback
        if not (model.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        del model.forward
        if self.own is not None:
            model.forward = self.own
        inputs = Inputs(args, kwargs)
        callback.report, values = converted(model, inputs, callback.error, callback.gradients)
        self.log(values)
        return model.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return what a copy of the model has for it, which nothing converts."""
        copied = memo[id(self.model)]
        return MethodType(type(copied).forward, copied) if self.own is None else copy.deepcopy(self.own, memo)


def register() -> tuple[str, ...]:
    """Add the shipped activations to `transformers.activations.ACT2FN`; repeating this is harmless.

    Call it before a model is loaded whose configuration names one, such as `hidden_act="gelu_fewbit3"`.

    Returns:
        Their names, such as `"gelu_fewbit3"`; gates, which take two inputs, are none of them.

    """
    activations = import_module("transformers.activations")
    names = tuple(name for name in shipped() if not name.startswith(tuple(f"{gate}_" for gate in GATES)))
    activations.ACT2FN.update({name: partial(activation, name) for name in names})
    return names
