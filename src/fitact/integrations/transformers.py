"""A callback for transformers' Trainer, and shipped activations that a configuration can name."""

from __future__ import annotations

from functools import partial, wraps
from importlib import import_module
from inspect import currentframe
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

        if is_converted(model):
            return
        if args.torch_compile:
            does_nothing("the Trainer compiles the model: convert it before the Trainer is made")
            return
        if self.plan is not None:
            log(planned(model, self.plan))
        else:
            self._at_first_batch(model, log)

    def _at_first_batch(self, model: nn.Module, log: Any) -> None:
        """Let the model's next call that trains convert it, before it runs."""
        own = vars(model).get("forward")  # accelerate sets one
        forward = model.forward

        @wraps(forward)
        def first(*args: Any, **kwargs: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            del model.forward
            if own is not None:
                model.forward = own
            self.report, values = converted(model, Inputs(args, kwargs), self.error, self.gradients)
            log(values)
            return model.forward(*args, **kwargs)

        model.forward = first


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
