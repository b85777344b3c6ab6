"""A model of a few lines: its parts, and the function of them that its forward is."""

from collections.abc import Callable
from typing import Any

from torch import nn


def built(forward: Callable[..., Any], **parts: Any) -> Any:
    """Return a module of a class of its own, whose forward gets it before the inputs."""
    model = type("Built", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(model, name, part)
    return model
