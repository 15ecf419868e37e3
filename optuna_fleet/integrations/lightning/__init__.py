"""A LightningModule and its Trainer on as many devices as the fleet gives their trial.

::

    from optuna_fleet.integrations.lightning import FleetStrategy

    def objective(trial):
        model = Classifier(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
        trainer = Trainer(
            max_epochs=10,
            strategy=FleetStrategy(trial),
            callbacks=[PyTorchLightningPruningCallback(trial, monitor="val_acc")],
        )
        trainer.fit(model, trial.batches("train", batch_size=32), trial.batches("val"))
        return trainer.callback_metrics["val_acc"].item()

Where Lightning asks for a loader, in a ``LightningDataModule`` too, it is given what
`FleetTrial.batches` returns.
"""

try:
    import lightning.pytorch as _  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}; please: pip install 'optuna-fleet[lightning]'") from None

from optuna_fleet.integrations.lightning.strategy import FleetStrategy as FleetStrategy
