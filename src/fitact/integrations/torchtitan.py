"""A policy of torchtitan, in place of its activation checkpointing.

config.activation_checkpoint = FitactAC.Config(error="rounding")
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger

from fitact.base import UsageError
from fitact.runtime.choose import convert
from fitact.runtime.saving import ERRORS


class FitactAC(ActivationCheckpointing):
    """Lets each block of a model run in a context of `fitact.saving`; nothing is checkpointed.

    The blocks are those of `model.layers`, before FSDP shards them. A block that torchtitan compiles afterwards
    runs as it is, so leave `compile.enable` off.

    Raises:
        UsageError: the error is none of `fitact.saving`'s.

    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The options of the policy.

        Attributes:
            error: as for `fitact.convert`: `"exact"`, `"rounding"` or `"coarse"`.

        """

        error: str = "exact"

    def __init__(self, config: FitactAC.Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        if config.error not in ERRORS:
            raise UsageError(f"error: expected {', '.join(ERRORS)}, got {config.error!r}")

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        convert(module, error=self.config.error)
        logger.warning(f"fitact: {base_fqn} runs in saving({self.config.error!r}), but as it is if it is compiled")
        return module
