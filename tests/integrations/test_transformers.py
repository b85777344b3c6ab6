"""A training run with transformers' Trainer, and axolotl's: the same losses, and what the loggers get."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fitact
from fitact.base import FitWarning
from fitact.integrations.step import converted
from fitact.integrations.transformers import FitactCallback
from fitact.runtime.measure import imported
from fitact.runtime.restore import Inputs
from tests.support.models import batch_of, made
from tests.support.refusals import refused
from tests.support.saving import differences

transformers = imported("transformers")
TEXTS = [{name: each[0] for name, each in batch_of("llama", seed=i).items()} for i in range(8)]


def trained(model: Any, folder: Path, *callbacks: Any, steps: int = 3, **given: Any) -> tuple[Any, Any]:
    """Return all losses with the trained parameters, and the trainer."""
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=steps, per_device_train_batch_size=2, seed=3, **quiet, **given
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=TEXTS, callbacks=[*callbacks])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return (losses, weights), trainer


@pytest.mark.parametrize("autocast", [False, True])
def test_same_training(autocast: bool, tmp_path: Path) -> None:
    baseline, model = made("llama lora, dropout"), made("llama lora, dropout")
    logger, callback, logs = transformers.TrainerCallback(), FitactCallback(error="exact"), []
    logger.on_log = lambda *_, **given: logs.append(dict(given["logs"]))  # as wandb's callback gets them
    given = {"bf16": autocast, "gradient_accumulation_steps": 2}
    expected, _ = trained(baseline, tmp_path, **given)
    actual, trainer = trained(model, tmp_path, logger, callback, **given)
    assert len(expected[0]) == 3 and not differences(expected, actual)
    first = logs[0]
    assert 0 < first["fitact/saved"] < 0.6 * first["fitact/saved_before"]
    assert 0 < first["fitact/peak"] < first["fitact/peak_before"]
    assert first["fitact/gradient_error"] == 0
    assert first.items() <= trainer.state.log_history[0].items()
    assert callback.report is not None and callback.report.saved_after == first["fitact/saved"]
    assert "forward" not in vars(model) or autocast  # what waited for the first batch is gone
    assert fitact.revert(model).sites


def test_rounding_and_a_second_run(tmp_path: Path) -> None:
    model, callback = made("llama lora, dropout"), FitactCallback("rounding")
    _, trainer = trained(model, tmp_path, callback)
    first = trainer.state.log_history[0]
    assert 0 < first["fitact/gradient_error"] < 0.05
    trainer.train()
    assert not any("fitact/saved" in entry for entry in trainer.state.log_history)
    with pytest.warns(FitWarning, match="converted already"):
        trained(model, tmp_path, FitactCallback(), steps=1)


def test_plan(tmp_path: Path) -> None:
    model = made("llama")
    inputs = batch_of("llama")
    planner = fitact.planner(model, example_inputs=inputs)
    plan = planner.plan(0.5 * (planner.least("exact") + planner.plan(1, "exact").baseline_peak) / 2**30, "exact")
    assert plan.fits and {group.policy for group in plan.groups} != {"baseline"}
    plan.save(tmp_path / "plan.json")
    expected, _ = trained(made("llama"), tmp_path)
    actual, trainer = trained(model, tmp_path, FitactCallback(plan=tmp_path / "plan.json"))
    assert not differences(expected, actual)
    assert trainer.state.log_history[0]["fitact/peak"] == plan.peak < plan.baseline_peak


def test_says_that_it_does_nothing(tmp_path: Path) -> None:
    with pytest.warns(FitWarning, match="does nothing here: the model saves nothing"):
        report, logged = converted(torch.nn.Linear(4, 4), Inputs((torch.randn(2, 4),)), "exact", gradients=True)
    assert report is not None and logged["fitact/saved"] == logged["fitact/saved_before"] > 0
    compiled = torch.compile(torch.nn.Linear(4, 4))
    with pytest.warns(FitWarning, match="is compiled: use fitact.compile"):
        assert converted(compiled, Inputs((torch.randn(2, 4),)), "exact", gradients=True) == (None, {})
    with pytest.warns(FitWarning, match="cannot be run"):
        assert converted(torch.nn.Linear(4, 4), Inputs((torch.randn(2, 5),)), "exact", gradients=False)[1] == {}
    for given, message in ({"plan": tmp_path}, "one of both"), ({"error": "none"}, "exact, rounding, coarse"):
        assert f"expected {message}" in refused(FitactCallback, **{"error": "exact", **given})


def test_a_copy_before_the_first_batch(tmp_path: Path) -> None:
    """It stays the model that it was."""
    model, averaging, copies = made("llama"), transformers.TrainerCallback(), []
    averaging.on_train_begin = lambda *_, **given: copies.append(copy.deepcopy(given["model"]))
    before = model(**batch_of("llama")).loss
    trained(model, tmp_path, FitactCallback(), averaging, steps=2)
    (copied,) = copies
    loss = copied(**batch_of("llama")).loss
    assert torch.equal(loss, before) and not torch.equal(model(**batch_of("llama")).loss, before)
    loss.backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_the_trainer_compiles(tmp_path: Path) -> None:
    model, given = made("llama"), {"torch_compile": True, "torch_compile_backend": "eager"}
    with pytest.warns(FitWarning, match="the Trainer compiles the model: convert it before"):
        trained(model, tmp_path, FitactCallback(), steps=1, **given)


@pytest.mark.filterwarnings("ignore")
def test_axolotl(tmp_path: Path) -> None:
    """Its own manager loads the plugin, which checks its arguments."""
    base: Any = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    from axolotl.utils.dict import DictDefault
    from pydantic import ValidationError

    from fitact.integrations.axolotl import FitactArgs

    def callbacks(**given: Any) -> Any:
        return manager.add_callbacks_post_trainer(DictDefault(FitactArgs(**given).model_dump()), None)

    manager = base.PluginManager.get_instance()
    manager.register("fitact.integrations.axolotl.FitactPlugin")
    assert "fitact.integrations.axolotl.FitactArgs" in manager.get_input_args()
    (callback,) = callbacks(fitact_error="exact")
    expected, _ = trained(made("llama"), tmp_path)
    actual, trainer = trained(made("llama"), tmp_path, callback)
    assert not differences(expected, actual)
    assert trainer.state.log_history[0]["fitact/saved"] < trainer.state.log_history[0]["fitact/saved_before"]
    with pytest.raises(ValidationError, match="fitact_error"):
        callbacks(fitact_error="none")
    assert "expected one of both" in refused(
        callbacks, fitact_error="exact", fitact_plan=str(tmp_path / "plan.json")
    )
