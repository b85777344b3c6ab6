"""A plugin for axolotl.

plugins:
  - fitact.integrations.axolotl.FitactPlugin
fitact_error: rounding  # or exact, coarse
"""

from __future__ import annotations

from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .transformers import FitactCallback


class FitactArgs(BaseModel):
    """What axolotl's configuration may say.

    Attributes:
        fitact_error: as `error` of `fitact.convert`; without a plan by default `"exact"`.
        fitact_plan: in its place the file of a plan.
        fitact_gradients: whether the gradients of the first batch are compared with the baseline's.

    """

    fitact_error: Literal["exact", "rounding", "coarse"] | None = None
    fitact_plan: str | None = None
    fitact_gradients: bool = True


class FitactPlugin(BasePlugin):
    """Adds `fitact.integrations.transformers.FitactCallback` to axolotl's trainer."""

    def get_input_args(self) -> str:
        """Return where the arguments are."""
        return "fitact.integrations.axolotl.FitactArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callback that the configuration asks for.

        Raises:
            UsageError: it asks for both an error and a plan, or for a plan that cannot be read.

        """
        gradients = cfg.fitact_gradients is not False
        return [FitactCallback(cfg.fitact_error, plan=cfg.fitact_plan, gradients=gradients)]
