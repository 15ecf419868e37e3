"""Hugging Face's Trainer: the loop is Trainer's, pruning a callback's.

python examples/ports/transformers_simple.py [--fleet]
"""

import optuna
from digits_data import parse_arguments, print_summary

from optuna_fleet import FleetExecutor

try:
    import transformers
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments
    from transformers_data import get_tokenizer, load_reviews, make_model

    from optuna_fleet.integrations.transformers import PruningCallback
except ImportError as error:
    raise SystemExit(f"{error}; please: pip install transformers accelerate datasets") from None

EPOCHS = 3


def accuracy(predicted):
    right = predicted.predictions.argmax(axis=1) == predicted.label_ids
    return {"accuracy": right.mean()}


def objective(trial):
    transformers.logging.set_verbosity_error()  # a trial needs no banner
    trainer = Trainer(
        model_init=lambda: make_model(trial.suggest_categorical("hidden", [16, 32])),
        args=TrainingArguments(
            output_dir=f"transformers_simple/{trial.number}",
            learning_rate=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=32,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        ),
        data_collator=DataCollatorWithPadding(get_tokenizer()),
        train_dataset=load_reviews(800, seed=0),
        eval_dataset=load_reviews(200, seed=1),
        compute_metrics=accuracy,
        callbacks=[PruningCallback(trial, "eval_accuracy")],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
