"""A LightningModule on a fleet trains as the plain loop does, wherever the trial is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import pytest
import torch
import torch.nn.functional as F
from optuna_integration import PyTorchLightningPruningCallback
from torchmetrics.classification import MulticlassAccuracy

from optuna_fleet import SharedPipeline
from optuna_fleet.events import WidthLimited
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.integrations.lightning import FleetStrategy
from tests.fleets import Leg, Noise, fleet_of, small_model
from tests.integrations.harness import (
    ALONE,
    MOVED,
    OFTEN_MOVED,
    QUIET,
    WIDE,
    are_cleared,
    close_to,
    flown,
    frees_its_devices_when_pruned,
)
from tests.nursery import preloading

pytestmark = QUIET

EPOCHS, BATCH_SIZE, ACCUMULATED = 3, 8, 2


class Classifier(pl.LightningModule):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.layers = small_model()

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log_dict({"val": self.loss(batch)})
        self.log("worst", self.loss(batch), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def trainer_of(trial: Any, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shown = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
    quiet = dict.fromkeys(shown, False)
    return pl.Trainer(**quiet, **{"max_epochs": 1, **options}, strategy=FleetStrategy(trial))


def fit(trial: Any, model: Any, *loaders: Any, **options: Any) -> Any:
    """Train it, by default without validation; returns the Trainer."""
    trainer = trainer_of(trial, **options)
    trainer.fit(model, trial.batches("train", BATCH_SIZE), *loaders)
    return trainer


def by_lightning(trial: Any) -> float:
    best = pl.callbacks.EarlyStopping("val", patience=1, min_delta=-1.0)
    trainer = fit(
        trial,
        Classifier(),
        trial.batches("val", BATCH_SIZE),
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[PyTorchLightningPruningCallback(trial, monitor="val"), best],
    )
    seen = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trial.set_user_attr("seen", [seen["loss"], seen["worst"], best.best_score.item()])
    trial.set_user_attr("steps", trainer.global_step)
    return seen["val"]


def by_hand(trial: Any) -> float:
    model = Classifier()
    (optimizer,), (scheduler,) = model.configure_optimizers()
    trial.prepare(model, optimizer, scheduler)
    losses = []
    for epoch in trial.epochs(EPOCHS):
        model.train()
        batches = trial.batches("train", BATCH_SIZE)
        total = torch.zeros((), dtype=torch.float64)
        for step, batch in enumerate(batches, 1):
            loss = model.loss(batch)
            total += loss.detach() * trial.shard_size
            (loss / ACCUMULATED).backward()
            if step % ACCUMULATED == 0 or step == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            parts = [(model.loss(batch).item(), len(batch[1])) for batch in trial.batches("val")]
        scheduler.step()
        losses.append(sum(loss * size for loss, size in parts) / sum(size for _, size in parts))
        trial.report(losses[-1], epoch)
    worst = max(loss for loss, _ in parts)
    trial.set_user_attr("seen", [total.item() / 41, worst, min(losses)])
    trial.set_user_attr("steps", EPOCHS * -(-len(batches) // ACCUMULATED))
    return losses[-1]


def data() -> SharedPipeline:
    # The last batch of 41 samples has one, which some ranks have a stand-in for.
    return SharedPipeline(train=Noise(41, augment=True), val=Noise(20), val_tiny=Noise(1))


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with preloading("lightning.pytorch"), fleet_of(devices=3, pipeline=data()) as fleet:
        yield fleet


def is_alike(fleet: Any, objective: Any, legs: list[Leg], rel: float = 1e-10) -> Any:
    """Whether it gives on one device what it gives so; returns that trial."""
    alone, other = flown(fleet, objective, ALONE), flown(fleet, objective, legs)
    assert other.value == close_to(alone.value, rel)
    assert other.user_attrs == alone.user_attrs
    return alone


def size_of(model: Any) -> float:
    """One number that all of its state counts in."""
    return sum(float(each.abs().sum()) for each in model.state_dict().values())


def test_the_same_as_by_hand_on_any_devices(three: Any) -> None:
    expected, alone = flown(three, by_hand, ALONE), flown(three, by_lightning, [Leg((1,))])
    assert alone.intermediate_values == expected.intermediate_values
    assert alone.user_attrs == expected.user_attrs
    for legs in (WIDE, OFTEN_MOVED):
        trial = flown(three, by_lightning, legs)
        assert trial.value == close_to(alone.value)
        assert trial.intermediate_values == close_to(alone.intermediate_values)
        # The largest loss of a step is that of a shard.
        seen, wanted = trial.user_attrs["seen"], alone.user_attrs["seen"]
        assert [seen[0], seen[2]] == close_to([wanted[0], wanted[2]])
        assert seen[1] >= wanted[1]
        assert trial.user_attrs["steps"] == alone.user_attrs["steps"]


class Usual(pl.LightningModule):
    """As most write it: in float32, logs losses and metrics, per step and per epoch."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = small_model().float()
        self.train_right = MulticlassAccuracy(3)
        self.val_right = MulticlassAccuracy(3)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        outputs = self.layers(batch[0].float())
        loss = F.cross_entropy(outputs, batch[1])
        self.train_right(outputs, batch[1])
        self.log("train_loss", loss)
        self.log("train_right", self.train_right, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        outputs = self.layers(batch[0].float())
        self.val_right(outputs, batch[1])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]), prog_bar=True)
        self.log("val_right", self.val_right, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        config = {"scheduler": scheduler, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def usual(trial: Any) -> float:
    trainer = fit(
        trial,
        Usual(trial.suggest_float("lr", 1e-4, 1e-2, log=True)),
        trial.batches("val", BATCH_SIZE),
        max_epochs=10,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        callbacks=[
            PyTorchLightningPruningCallback(trial, monitor="val_right"),
            pl.callbacks.EarlyStopping("val_loss", patience=3),
        ],
    )
    return trainer.callback_metrics["val_right"].item()


def test_the_check_clears_it() -> None:
    are_cleared(data(), usual)


def test_a_pruned_trial_frees_its_devices(three: Any) -> None:
    frees_its_devices_when_pruned(three, by_lightning)


class Some(Classifier):
    """Logs on the first rank of the trial only."""

    def validation_step(self, batch: Any, index: int) -> None:
        if self.global_rank == 0:
            self.log("val", self.loss(batch))


class Measured(Classifier):
    """Each rank computes what it has logged of all."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.right(self.layers(batch[0]), batch[1])
        self.log("right", self.right, on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.right(self.layers(batch[0]), batch[1])
        self.log("val_right", self.right)


class Gathers(Classifier):
    """What has as many rows as this rank has samples."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", float(self.all_gather(self.layers(batch[0])).sum()))


class AtEpochEnd(Classifier):
    """Logs what it has collected itself, on each rank."""

    def __init__(self, hook: str, *, leads_a_scheduler: bool) -> None:
        super().__init__()
        self.leads_a_scheduler = leads_a_scheduler
        self.seen: list[torch.Tensor] = []
        setattr(self, hook, self.log_own)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(loss := self.loss(batch))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(self.loss(batch))

    def log_own(self) -> None:
        self.log("own", torch.stack(self.seen).mean().detach())
        self.seen.clear()

    def configure_optimizers(self) -> Any:
        (optimizer,), (scheduler,) = super().configure_optimizers()
        if self.leads_a_scheduler:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        config = {"scheduler": scheduler, "monitor": "own"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def validates(module: Any, *val: Any) -> Any:
    return lambda trial: fit(trial, module(), trial.batches(*val)) and None


def stops_early(trial: Any) -> None:
    model = AtEpochEnd("on_validation_epoch_end", leads_a_scheduler=False)
    early = pl.callbacks.EarlyStopping("own", check_on_train_epoch_end=False)
    fit(trial, model, trial.batches("val", BATCH_SIZE), max_epochs=2, callbacks=[early])


def slows_on_a_plateau(trial: Any) -> None:
    fit(trial, AtEpochEnd("on_train_epoch_end", leads_a_scheduler=True), max_epochs=2)


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (validates(Some, "val", BATCH_SIZE), "logged on 1 of the trial's devices only"),
        (validates(Gathers, "val", 3), r"unlike shapes on the trial's devices: \[\[2, 3\], \[1, "),
        (validates(Measured, "val_tiny", BATCH_SIZE), "on batches of 1 at most"),
        (stops_early, "`own`: monitored by a callback or a scheduler"),
        (slows_on_a_plateau, "`own`: monitored by a callback or a scheduler"),
    ],
)
def test_what_is_not_the_whole_trials_is_to_be_logged_on_one(
    three: Any, objective: Any, why: str
) -> None:
    with pytest.raises(TrialError, match=why):
        flown(three, objective, [Leg((0, 1))])
    limits = [event.max_devices for event in three.events if isinstance(event, WidthLimited)]
    assert set(limits) == {1}  # the controller goes on from the last checkpoint then
    assert flown(three, lambda trial: objective(trial) or 0.0, ALONE).value == 0


def test_the_epoch_that_averages_of_weights_add_is_trained_too(three: Any) -> None:
    """For the statistics of BatchNorm."""

    class Steady(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def objective(trial: Any) -> float:
        model, averages = Steady(), pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
        fit(trial, model, trial.batches("val", BATCH_SIZE), max_epochs=2, callbacks=[averages])
        num_batches = len(trial.batches("train", BATCH_SIZE))
        trial.set_user_attr("seen", int(model.layers[1].num_batches_tracked) / num_batches)
        return size_of(model)

    alone = is_alike(three, objective, [Leg((0, 1), 2), Leg((2,))])
    assert alone.user_attrs["seen"] == 1


class Worse(Classifier):
    """With each epoch."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_acc", -float(self.current_epoch))


def test_the_best_of_the_checkpoints_moves_along(
    three: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text()
    title = "^## Lightning's ModelCheckpoint$"
    (code,) = re.findall(f"{title}.*?```python\n(.*?)```", page, re.S | re.M)
    exec(code, names := {"pl": pl, "Classifier": Worse})
    monkeypatch.chdir(tmp_path)
    moved = flown(three, names["objective"], MOVED, direction="maximize")
    assert moved.value == 0
    assert Path(moved.user_attrs["best_file"]).parent == tmp_path / "best" / "0"
    assert Path(moved.user_attrs["best_file"]).is_file()


def test_a_trial_may_fit_several_times_but_once_with_each_trainer(three: Any) -> None:
    def objective(trial: Any) -> float:
        model = Classifier()
        for max_epochs in (1, 3):
            fit(trial, model, max_epochs=max_epochs)
        return size_of(model)

    def again(trial: Any) -> None:
        trainer = fit(trial, model := Classifier())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, trial.batches("train", BATCH_SIZE))

    is_alike(three, objective, MOVED)
    with pytest.raises(FleetConfigError, match="call `fit` once for each Trainer"):
        flown(three, again, ALONE)


def test_metrics_count_no_stand_ins(three: Any) -> None:
    def objective(trial: Any) -> float:
        return fit(trial, Measured()).callback_metrics["right"].item()

    is_alike(three, objective, WIDE, rel=0)


def test_what_can_not_be_is_told_of(three: Any) -> None:
    with pytest.raises(FleetConfigError, match="`max_epochs` is -1"):
        flown(three, lambda trial: fit(trial, Classifier(), max_epochs=-1), ALONE)
    with pytest.raises(FleetConfigError, match="given a `FixedTrial`"):
        FleetStrategy(optuna.trial.FixedTrial({}))  # type: ignore[arg-type]


class Rest(Classifier):
    """Of what a Trainer does: several loaders, a test, predictions."""

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("tested", self.loss(batch))

    def predict_step(self, batch: Any, index: int) -> Any:
        return {"outputs": self.layers(batch[0]), "labels": self.all_gather(batch[1]).tolist()}


def test_the_rest_of_a_trainer(three: Any) -> None:
    """Several loaders, `max_steps`, averages of weights that move along, tests, predictions."""

    def objective(trial: Any) -> float:
        loaders = [trial.batches("val", size) for size in (BATCH_SIZE, 5)]
        averages = getattr(pl.callbacks, "EMAWeightAveraging", None)  # from Lightning 2.6 on
        callbacks = [averages(decay=0.9)] if averages else []
        options = {"max_epochs": EPOCHS, "max_steps": 8, "callbacks": callbacks}
        trainer = fit(trial, model := Rest(), loaders, **options)
        trial.set_user_attr("steps", trainer.global_step)
        seen = sum(float(value) for value in trainer.callback_metrics.values())
        tested = trainer.test(model, loaders[0], verbose=False)[0]["tested"]
        predicted = trainer.predict(model, loaders[1])  # each rank has all of them
        trial.set_user_attr("labels", [batch["labels"] for batch in predicted])
        outputs = sum(float(batch["outputs"].abs().sum()) for batch in predicted)
        again = trainer.validate(model, loaders[1], verbose=False)[0]["val"]
        return size_of(model) + seen + tested + outputs + again

    for legs in (WIDE, MOVED):
        assert is_alike(three, objective, legs).user_attrs["steps"] == 8
