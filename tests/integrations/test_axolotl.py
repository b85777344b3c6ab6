"""axolotl's plugin, found by axolotl's own manager, and a training run with what it adds."""

from pathlib import Path
from typing import Any

import pytest

from fitact.base import UsageError
from tests.integrations.test_transformers import trained
from tests.support.models import made
from tests.support.saving import differences

pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "fitact.integrations.axolotl.FitactPlugin"


def configuration(**given: Any) -> Any:
    from axolotl.utils.dict import DictDefault

    from fitact.integrations.axolotl import FitactArgs

    return DictDefault(FitactArgs(**given).model_dump())


def test_training(tmp_path: Path) -> None:
    from axolotl.integrations.base import PluginManager

    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert "fitact.integrations.axolotl.FitactArgs" in manager.get_input_args()
    (callback,) = manager.add_callbacks_post_trainer(configuration(fitact_error="exact"), None)
    expected, _ = trained(made("llama"), tmp_path)
    found, trainer = trained(made("llama"), tmp_path, callback)
    assert not differences(expected, found)
    assert trainer.state.log_history[0]["fitact/saved"] < trainer.state.log_history[0]["fitact/saved_before"]


def test_arguments(tmp_path: Path) -> None:
    from axolotl.integrations.base import load_plugin
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="fitact_error"):
        configuration(fitact_error="none")
    both = configuration(fitact_error="exact", fitact_plan=str(tmp_path / "plan.json"))
    with pytest.raises(UsageError, match="expected one of both"):
        load_plugin(NAME).add_callbacks_post_trainer(both, None)
