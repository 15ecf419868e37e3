"""PyTorch Lightning on several devices: the trainer is Lightning's, pruning its callback's.

python examples/ports/pytorch_lightning_fleet.py --trials 40

Beside pytorch_lightning_simple.py: a trial may use several devices, is checkpointed and resumed
where its process dies, and all trials share one pipeline of data.
"""

import logging

import optuna
import torch
import torch.nn.functional as F
from digits_data import load_datasets, parse_arguments, print_summary
from torch import nn

from optuna_fleet import FleetExecutor, SharedPipeline

try:
    import lightning.pytorch as pl
    from optuna_integration import PyTorchLightningPruningCallback

    from optuna_fleet.integrations.lightning import FleetStrategy
except ImportError as error:
    raise SystemExit(f"{error}; please: pip install lightning optuna-integration") from None

EPOCHS = 5


class DigitReader(pl.LightningModule):
    def __init__(self, hidden, dropout, lr):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        right = self.layers(images).argmax(dim=1) == labels
        self.log("val_acc", right.float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def objective(trial):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # a trial needs no banner
    pl.seed_everything(trial.number, verbose=False)
    model = DigitReader(
        hidden=trial.suggest_int("hidden", 8, 128, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        strategy=FleetStrategy(trial),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[PyTorchLightningPruningCallback(trial, monitor="val_acc")],
    )
    trainer.fit(model, trial.batches("train", batch_size=32), trial.batches("val"))
    return trainer.callback_metrics["val_acc"].item()


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    train, val = load_datasets()
    executor = FleetExecutor(SharedPipeline(train=train, val=val), devices=arguments.devices)
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
