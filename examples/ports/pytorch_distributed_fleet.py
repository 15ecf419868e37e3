"""Data-parallel trials whose devices the fleet chooses; their collectives are their own.

python examples/ports/pytorch_distributed_fleet.py --trials 40

What pytorch_distributed_simple.py needs besides: torchrun, a loop for the other ranks, DDP,
samplers.
"""

import optuna
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_data import load_datasets, parse_arguments, print_summary
from torch import nn

from optuna_fleet import FleetExecutor, SharedPipeline

BATCH_SIZE = 32
EPOCHS = 5


def objective(trial):
    hidden = trial.suggest_int("hidden", 8, 128, log=True)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer = trial.prepare(model, optimizer)

    for epoch in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        counts = torch.zeros(2, device=trial.device)  # right ones, all
        with torch.no_grad():
            for images, labels in trial.batches("val", BATCH_SIZE):
                right = model(images).argmax(dim=1) == labels
                counts += torch.tensor([right.sum(), len(labels)], device=trial.device)
        dist.all_reduce(counts)  # over the ranks of this trial
        accuracy = float(counts[0] / counts[1])

        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    trial.set_user_attr("world_size", dist.get_world_size())
    return accuracy


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    train, val = load_datasets()
    executor = FleetExecutor(SharedPipeline(train=train, val=val), devices=arguments.devices)
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
