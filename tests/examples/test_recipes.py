"""What docs/recipes.md and objective.md show is run, on several devices and with a move."""

from __future__ import annotations

import os
import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import sklearn.linear_model
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2

import tests.fleets
from optuna_fleet import FleetConfigError, FleetExecutor, SharedPipeline
from tests.fleets import Leg, Noise, fleet_of, small_model

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "\n".join((DOCS / f"{page}.md").read_text() for page in ("recipes", "objective"))


def make_model() -> Any:
    torch.manual_seed(0)
    return small_model()


def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def evaluate(trial: Any, model: Any) -> float:
    def loss(outputs: Any, labels: Any) -> Any:
        return F.cross_entropy(outputs, labels, reduction="sum")

    return tests.fleets.evaluate(trial, model, loss) / 20


def recipe(title: str, **names: Any) -> dict[str, Any]:
    """The names that the code of a section defines."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M)
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    found = {
        "torch": torch,
        "optuna": optuna,
        "F": F,
        "np": np,
        "os": os,
        "pickle": pickle,
        "make_model": make_model,
        "step": step,
        "evaluate": evaluate,
        "SharedPipeline": SharedPipeline,
        **names,
    }
    exec("\n".join(blocks), found)
    return found


def flown(fleet: Any, objective: Any, *legs: Leg) -> list[float]:
    fleet.script = {0: list(legs)}
    study = optuna.create_study()
    study.enqueue_trial({"strength": 0.25})
    study.optimize(objective, n_trials=1, executor=fleet)
    return list(study.trials[0].intermediate_values.values())


def gives_the_same_anywhere(
    fleet: Any, objective: Any, num_reports: int, rel: float = 1e-10
) -> None:
    alone = flown(fleet, objective, Leg((0,)))
    assert len(alone) == num_reports
    for legs in ([Leg((0, 1, 2))], [Leg((0, 1), 2), Leg((2,))]):
        assert flown(fleet, objective, *legs) == pytest.approx(alone, rel=rel)


@pytest.mark.parametrize(
    ("title", "num_reports"),
    [
        ("The number of batches, for a scheduler", 4),
        ("A number of steps instead of epochs", 3),
        ("A fraction of the data as fidelity", 3),
        ("Hyperparameters of the data", 4),
        ("K-fold cross-validation in one trial", 3),
    ],
)
def test_a_recipe_gives_the_same_anywhere(fleet: Any, title: str, num_reports: int) -> None:
    names = recipe(title)
    if "make_pipeline" not in names:
        gives_the_same_anywhere(fleet, names["objective"], num_reports)
        return
    pipeline = names["make_pipeline"](Noise(41, augment=True), Noise(20))
    with fleet_of(devices=3, pipeline=pipeline) as own:
        gives_the_same_anywhere(own, names["objective"], num_reports)


def test_mixed_precision_gives_the_same_to_its_rounding(fleet: Any) -> None:
    names = recipe("Mixed precision and clipping")
    gives_the_same_anywhere(fleet, names["objective"], 4, rel=1e-2)
    bf16_step = names["bf16_step"]

    def in_bf16(trial: Any) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trial.prepare(model, optimizer)
        for epoch in trial.epochs(4):
            for x, y in trial.batches("train", batch_size=8):
                bf16_step(trial, model, optimizer, x, y)
            trial.report(evaluate(trial, model), epoch)
        return trial.best_value

    gives_the_same_anywhere(fleet, in_bf16, 4, rel=1e-1)


def test_smaller_copies_are_made_once(tmp_path: Path) -> None:
    for name, size in (("a/1.jpg", (300, 200)), ("b/2.jpg", (90, 400))):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.effect_noise(size, 50).convert("RGB").save(tmp_path / name)
    make_smaller = recipe("Smaller copies of large photographs", Image=Image, v2=v2)[
        "make_smaller"
    ]
    smaller = make_smaller(tmp_path, tmp_path.with_name("smaller"), side=50)
    copies = sorted(path for path in smaller.rglob("*") if path.is_file())
    assert [str(path.relative_to(smaller)) for path in copies] == ["a/1.jpg", "b/2.jpg"]
    sizes = []
    for path in copies:
        with Image.open(path) as image:
            sizes.append(image.size)
    assert sizes == [(75, 50), (50, 222)]
    before = [path.stat() for path in copies]
    make_smaller(tmp_path, smaller, side=50)
    assert [path.stat() for path in copies] == before


class Stream(torch.utils.data.IterableDataset):
    """Can be read once."""

    def __init__(self, samples: Any) -> None:
        self.samples = iter(samples)

    def __iter__(self) -> Any:
        return self.samples


def test_a_stream_is_written_once(tmp_path: Path) -> None:
    make_pipeline = recipe("A stream of data", FOLDER=str(tmp_path))["make_pipeline"]
    sets = [[noise[index] for index in range(len(noise))] for noise in (Noise(41), Noise(20))]
    make_pipeline(*map(Stream, sets))
    with fleet_of(devices=2, pipeline=make_pipeline(Stream([]), Stream([]))) as fleet:
        of_stream = tests.fleets.run(fleet, tests.fleets.train, Leg((0, 1)))
    study = optuna.create_study()
    inline = FleetExecutor(SharedPipeline(train=sets[0], val=sets[1]), cluster="inline")
    study.optimize(tests.fleets.train, n_trials=1, executor=inline)
    losses = study.trials[0].user_attrs["losses"]
    assert of_stream.user_attrs["losses"] == pytest.approx(losses, rel=1e-10)


MOVES = (Leg((0, 1), 2), Leg((1,)))  # whose rank 0 is another process


def test_what_a_writer_shows_after_a_move(fleet: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    names = {"FOLDER": str(tmp_path), "SummaryWriter": SummaryWriter}
    objective = recipe("A TensorBoard writer", **names)["objective"]
    reported = flown(fleet, objective, *MOVES)
    # File by file: of files of one second it may pass over all but one.
    files = map(str, (tmp_path / "0").iterdir())
    read = [EventAccumulator(file).Reload() for file in files]
    events = [event for part in read if part.Tags()["scalars"] for event in part.Scalars("loss")]
    shown = sorted(events, key=lambda event: event.step)
    assert [event.step for event in shown] == [0, 1, 2, 3]  # by one process only
    assert [event.value for event in shown] == pytest.approx(reported, rel=1e-6)


def test_mlflow_has_one_run_for_a_trial_that_moves(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow  # here, as not each worker of the tests needs it

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"file://{tmp_path}/runs")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    objective = recipe("MLflow", mlflow=mlflow, nullcontext=nullcontext)["objective"]
    reported = flown(fleet, objective, *MOVES)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    logged = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == list(enumerate(reported))


def test_wandb_has_one_run_for_a_trial_that_moves(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    objective = recipe("Weights & Biases", wandb=wandb, nullcontext=nullcontext)["objective"]
    assert len(flown(fleet, objective, *MOVES)) == 4
    files = [path.stem for path in tmp_path.rglob("*.wandb")]
    assert len(files) == 2  # before the move, and after
    assert len(set(files)) == 1  # of one run


@pytest.mark.filterwarnings("ignore:.*Callback has been deprecated")
@pytest.mark.filterwarnings("ignore:.* is experimental")
@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_decorators_of_trackers_are_refused_by_the_name_of_their_recipe(
    fleet: Any, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna_integration

    monkeypatch.setenv("WANDB_MODE", "disabled")
    callbacks = {"mlflow": "MLflowCallback", "wandb": "WeightsAndBiasesCallback"}
    callback = getattr(optuna_integration, callbacks[tracker])()
    decorated = getattr(callback, f"track_in_{tracker}")()(lambda trial: 0.0)
    study = optuna.create_study()
    with pytest.raises(FleetConfigError, match=rf"track_in_{tracker}.*docs/recipes\.md"):
        study.optimize(decorated, n_trials=1, executor=fleet)
    assert {"## MLflow", "## Weights & Biases"} <= set(TEXT.splitlines())
    assert study.trials == []


def test_a_model_of_another_library(fleet: Any) -> None:
    objective = recipe("A model of another library", sklearn=sklearn)["objective"]
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=2, executor=fleet)
    assert all(len(trial.intermediate_values) == 4 for trial in study.trials)
    assert study.best_value > 0
