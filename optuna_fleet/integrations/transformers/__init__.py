"""A `transformers.Trainer` on as many devices as the fleet gives its trial.

::

    from optuna_fleet.integrations.transformers import FleetTrainer, PruningCallback

    def objective(trial):
        trainer = FleetTrainer(
            trial,
            model=AutoModelForSequenceClassification.from_config(config),
            args=TrainingArguments(
                learning_rate=trial.suggest_float("lr", 1e-5, 1e-3, log=True),
                per_device_train_batch_size=32,  # that of the whole trial
                eval_strategy="epoch",
            ),
            train_dataset="train",  # the data sets of the SharedPipeline, by name
            eval_dataset="val",
            callbacks=[PruningCallback(trial, "eval_loss")],
        )
        trainer.train()
        return trainer.evaluate()["eval_loss"]

A Trainer class of your own: ``class Mine(FleetTrainerMixin, MyTrainer): pass``.
"""

try:
    import transformers as _  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}; please: pip install 'optuna-fleet[transformers]'") from None

from optuna_fleet.integrations.transformers.pruning import PruningCallback as PruningCallback
from optuna_fleet.integrations.transformers.trainer import FleetTrainer as FleetTrainer
from optuna_fleet.integrations.transformers.trainer import FleetTrainerMixin as FleetTrainerMixin
