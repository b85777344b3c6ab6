"""Names that are known from files, without importing what they are of, which takes seconds.

A name is refused here only if it is surely wrong; whoever uses it checks it again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from fitact.base import UsageError, near, quote

WORD = re.compile(r"[A-Za-z_][\w./-]*")  # a value of --set that is no literal


def known_functions() -> list[str]:
    """Return the names of activations, gates and formulas with learned parameters."""
    from fitact.fitter.catalog import CATALOG, GATES, LEARNED

    return [*CATALOG, *GATES, *LEARNED]


def check_function(
    kind: str, function: str, parameters: Mapping[str, float] | None = None, learned: Sequence[str] = ()
) -> None:
    """Raise UsageError if a name or a formula is surely wrong: all that can be known without SymPy.

    The kind is one of `METHODS`; `parameters` are those of an activation of the catalog, `learned` of a formula.
    """
    from fitact.fitter.catalog import CATALOG, GATES, LEARNED, check_known
    from fitact.fitter.syntax import Syntax

    if kind == "activations":
        check_known(function)
    if function in CATALOG:
        CATALOG[function].filled("", parameters or {})
    elif function not in GATES and function not in LEARNED:
        Syntax(function, kind.removesuffix("s")).check_names(("g", "u") if kind == "gates" else ("x", *learned))


def model_types() -> dict[str, str]:
    """Return the model types of transformers, each with the class of its configuration."""
    auto = installed("transformers") / "models" / "auto"
    texts = (_text(auto / name) for name in ("auto_mappings.py", "configuration_auto.py"))
    return dict(pair for text in texts for pair in re.findall(r'"([\w.-]+)"[,:] "(\w+Config)"', text))


def timm_models() -> list[str]:
    """Return the names of timm's models."""
    return re.findall(r"^@register_model\ndef (\w+)", _timm(), re.MULTILINE)


def check_model(kind: str, sizes: Iterable[str]) -> None:
    """Raise UsageError if transformers has no such model type, or its configuration no such size."""
    if known := model_types():
        if kind not in known:
            checkpoint = "/" in kind or any(kind.startswith(f"{prefix}-") for prefix in known)
            hint = "; that of a checkpoint is in its config.json" * checkpoint
            close = "" if "/" in kind else near(kind, [*known])
            raise UsageError(f"transformers has no model type {quote(kind)}{close}{hint}")
        folder = installed("transformers") / "models" / kind.replace("-", "_")
        text = "\n".join(map(_text, sorted(folder.glob("configuration_*.py"))))
        shared = _text(installed("transformers") / "configuration_utils.py")
        if f"class {known[kind]}(" in text and not re.search(r"^from \.\.\w", text, re.MULTILINE) and shared:
            for key in sizes:
                if not re.search(rf"\b{re.escape(key)}\b", text + shared):
                    fields = list(dict.fromkeys(re.findall(r"^ +(\w+): ", text, re.MULTILINE)))
                    raise UsageError(f"{kind}: its configuration has no {quote(key)}{near(key, fields)}")


def check_layers(kind: str, layers: Iterable[str]) -> None:
    """Raise UsageError if the source of a model type surely names no layer so.

    A model that takes layers from other files, or computes their names, is asked less: whether any model's source
    has the name, without a number at its end.
    """
    root = installed("transformers")
    own = "\n".join(map(_text, sorted((root / "models" / kind.replace("-", "_")).glob("modeling_*.py"))))
    elsewhere = r"^from \.{1,2}(?!configuration_|modeling_)\w|AutoModel|add_module|setattr"
    tells = own and not re.search(elsewhere, own, re.MULTILINE)
    shared = "modeling_layers", "modeling_utils", "time_series_utils"
    files = [root / f"{name}.py" for name in shared] if tells else (root / "models").glob("*/modeling_*.py")
    text = own + "".join(map(_text, files)) + (_timm() if "ackbone" in own and find_spec("timm") else "")
    for layer in layers if text else ():
        name = layer.rpartition(".")[2]
        there = re.search(rf"\b{re.escape(name)}\b", text) if tells else name.rstrip("0123456789") in text
        if not name.isdecimal() and not there:
            linear = list(dict.fromkeys(re.findall(r"self\.(\w+) = (?:nn\.Linear|Conv1D)\(", own)))
            raise UsageError(f"--lora {quote(layer)}: {kind} has no linear layer of that name{near(name, linear)}")


def check_timm(name: str) -> None:
    """Raise UsageError if timm has no such model, or surely no such weights of it."""
    model, _, tag = name.partition(".")
    source = _timm()
    if (known := timm_models()) and model not in source:
        raise UsageError(f"timm has no model {quote(name)}{near(name, known)}")
    tags = list(dict.fromkeys(re.findall(rf"""["']{re.escape(model)}\.([\w.-]+)["']""", source)))
    if tag and tags and tag not in tags:
        raise UsageError(f"timm's {model} has no weights {quote(tag)}{near(tag, tags)}")


def check_place(call: str) -> None:
    """Raise UsageError unless a text may be MODULE:CALLABLE, with a module that is there and has such a name."""
    module, _, name = call.partition(":")
    if not module or not name or module.endswith(".py"):
        raise UsageError(f"{quote(call)}: expected MODULE:CALLABLE, such as my_models:tiny")
    top = module.partition(".")[0]
    if not top or top in sys.modules:
        return
    spec = PathFinder.find_spec(top, [""]) or find_spec(top)
    if spec is None:
        raise UsageError(f"{module}: cannot be imported: ModuleNotFoundError: No module named {quote(top)}")
    text = _text(Path(spec.origin or "")) if top == module else ""
    there = re.findall(r"^(?:def|class) ([A-Za-z]\w*)", text, re.MULTILINE)
    if there and not re.search(rf"\b(globals|vars|__dict__|__getattr__|{re.escape(name)})\b|import \*", text):
        raise UsageError(f"{module}: it has no callable {quote(name)}{near(name, there)}")


@cache
def _timm() -> str:
    return "\n".join(map(_text, sorted((installed("timm") / "models").glob("*.py"))))


def installed(name: str) -> Path:
    """Return the folder of a package; UsageError if it is not installed."""
    spec = find_spec(name)
    if spec is None:
        raise UsageError(f"{name} is not installed: pip install {name}")
    places: Sequence[str] = spec.submodule_search_locations or ("",)
    return Path(places[0])


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""
