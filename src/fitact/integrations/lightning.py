"""A callback for Lightning's Trainer."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

from lightning.pytorch import Callback
from torch import nn

from fitact.runtime.restore import Inputs

from .step import Converting, converted, is_converted, planned


class _Step(nn.Module):
    """The training step of a LightningModule, as a model that fitact converts."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.step = module, module.training_step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)


class FitactCallback(Converting, Callback):
    """Lets the training step run in a context of `fitact.saving`, and logs what that saves.

    The first batch is counted before it is trained with. The trainer's loggers get `fitact/saved_before`,
    `fitact/saved`, `fitact/peak_before` and `fitact/peak` in bytes, and `fitact/gradient_error` as a share of the
    gradient's norm. A warning says so if nothing can be saved. A step that asks for its trainer, such as one with
    manual optimization, cannot be counted: a warning says this, and the step runs as it is.

    Args:
        error: as for `fitact.convert`; by default `"exact"`.
        plan: in place of an error: a plan of `fitact.plan`, or the file of one; paths of blocks are those of the
            LightningModule.
        gradients: whether the gradients of the first batch are compared with the baseline's, in a step of each.

    Attributes:
        report: what `fitact.convert` returned; None before the first step, and with a plan.

    Raises:
        UsageError: both an error and a plan are given, or one that is not valid.

    """

    _done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Convert with the first batch."""
        if self._done:
            return
        self._done = True
        if is_converted(pl_module, self._model):
            return
        if self.plan is not None:
            self._model, values = pl_module, planned(pl_module, self.plan)
        else:
            step = _Step(pl_module)
            given = len(signature(pl_module.training_step).parameters)  # a step may leave out the number
            inputs = Inputs((batch, batch_idx)[:given])
            pl_module.trainer = None  # a step that is only counted logs nothing, and the trainer is not copied
            try:
                with trainer.precision_plugin.forward_context(), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*`self.trainer` reference is not registered")
                    self.report, values = converted(step, inputs, self.error, self.gradients)
            finally:
                pl_module.trainer = trainer
            vars(step)["__wrapped__"] = step.step  # whose arguments Lightning reads
            vars(pl_module)["training_step"] = step
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the training step back."""
        vars(pl_module).pop("training_step", None)
        self._done = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the training step back."""
        self.on_train_end(trainer, pl_module)
