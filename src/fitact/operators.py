"""Register fitact's operators once both fitact and PyTorch are imported, in either order.

An exported program refers to operators by name, and `import fitact` should be enough to load it. But this must not
import PyTorch, which takes seconds. If PyTorch is imported later, its import registers the operators.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RUNTIME = "fitact.runtime"


def register() -> None:
    """Register the operators now if PyTorch is already imported, else when it is imported."""
    if "torch" in sys.modules:
        import_module(f"{RUNTIME}.norms")  # also registers those of activations
        import_module(f"{RUNTIME}.shipped")
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Registers the operators after an import of PyTorch, of the runtime or of one of its modules.

    It waits until a module of the runtime is complete, because the operators import it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec that other finders give for such a module; None for all other modules."""
        if name != "torch" and not f"{name}.".startswith(f"{RUNTIME}."):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                loader.exec_module = execute  # type: ignore[method-assign]
                with suppress(ValueError):
                    sys.meta_path.remove(self)
                try:
                    execute(module)
                except BaseException:
                    sys.modules.pop(name, None)  # as the import system does next
                    raise
                finally:
                    register()

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
