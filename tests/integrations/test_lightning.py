"""A training run with Lightning's Trainer: the same losses, and what its loggers get."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.saving import differences

lightning: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
FitactCallback: Any = import_module("fitact.integrations.lightning").FitactCallback
pytestmark = pytest.mark.filterwarnings("ignore")


def run(folder: Path, *callbacks: Any, named: bool = True) -> tuple[Any, list[dict[str, float]], Any]:
    """Return losses and parameters, what the logger got, and the module."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128)
            self.layers = nn.Sequential(*first, nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 8))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            self.log("loss", loss)
            losses.append(loss.item()) if self._trainer is not None else None
            return loss

    class Short(Module):
        def training_step(self, batch: Tensor) -> Tensor:
            return super().training_step(batch, 0)

    losses, recorded = list[float](), list[dict[str, float]]()
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 32)), batch_size=64)
    module = Module() if named else Short()
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "default_root_dir": folder, "log_every_n_steps": 1}
    logger = import_module("lightning.pytorch.loggers.logger").DummyLogger()
    logger.log_metrics = lambda metrics, step=None: recorded.append(metrics)
    trainer = lightning.Trainer(max_epochs=2, logger=logger, callbacks=[*callbacks], **quiet)
    trainer.fit(module, data)
    return (losses, dict(module.named_parameters())), recorded, module


@pytest.mark.parametrize("named", [True, False])
def test_same_training(named: bool, tmp_path: Path) -> None:
    expected, _, _ = run(tmp_path, named=named)
    actual, recorded, module = run(tmp_path, FitactCallback(error="exact"), named=named)
    assert len(expected[0]) == 8 and not differences(expected, actual)
    (first,) = [metrics for metrics in recorded if "fitact/saved" in metrics]
    assert 0 < first["fitact/saved"] < 0.7 * first["fitact/saved_before"]
    assert first["fitact/gradient_error"] == 0 and first["fitact/peak"] <= first["fitact/peak_before"]
    assert "training_step" not in vars(module)
    assert sum("loss" in metrics for metrics in recorded) == 8  # what was only counted logged nothing


def test_no_warning_of_what_is_only_counted(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    run(tmp_path, FitactCallback())
    assert not [each for each in recwarn if "self.trainer" in str(each.message)]


def test_copies_train_themselves(tmp_path: Path) -> None:
    class Snapshot(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.copy = copy.deepcopy(pl_module)

    snapshot = Snapshot()
    *_, module = run(tmp_path, snapshot, FitactCallback())
    module.zero_grad()
    snapshot.copy.training_step([torch.randn(4, 32)], 0).backward()
    assert all(parameter.grad is not None for parameter in snapshot.copy.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_converts_again_after_an_exception(tmp_path: Path) -> None:
    class Failing(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("in a step")

    callback = FitactCallback()
    with pytest.raises(RuntimeError, match="in a step"):
        run(tmp_path, callback, Failing())
    report, callback.report = callback.report, None
    *_, module = run(tmp_path, callback)
    assert callback.report == report is not None
    assert "training_step" not in vars(module)


def test_rounding(tmp_path: Path) -> None:
    callback = FitactCallback("rounding")
    (first,) = [metrics for metrics in run(tmp_path, callback)[1] if "fitact/saved" in metrics]
    assert 0 < first["fitact/gradient_error"] < 0.05
    assert callback.report is not None and callback.report.saved_after == first["fitact/saved"]
