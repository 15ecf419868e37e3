"""PyTorch Ignite: engines, metrics, and pruning by a handler.

python examples/ports/pytorch_ignite_simple.py [--fleet]
"""

import optuna
import torch
import torch.nn.functional as F
from digits_data import get_loaders, parse_arguments, print_summary
from torch import nn

from optuna_fleet import FleetExecutor

try:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy
    from optuna_integration import PyTorchIgnitePruningHandler
except ImportError as error:
    raise SystemExit(f"{error}; please: pip install pytorch-ignite optuna-integration") from None

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPOCHS = 5


def objective(trial):
    torch.manual_seed(trial.number)
    hidden = trial.suggest_int("hidden", 8, 128, log=True)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)).to(DEVICE)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    train_loader, val_loader = get_loaders(batch_size=32)

    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device=DEVICE)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=DEVICE)
    pruning = PyTorchIgnitePruningHandler(trial, "accuracy", trainer)
    evaluator.add_event_handler(Events.COMPLETED, pruning)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(val_loader))

    trainer.run(train_loader, max_epochs=EPOCHS)
    return evaluator.state.metrics["accuracy"]


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
