"""A sweep on the nodes of a Slurm allocation; with `harvest`, on those that Slurm can spare."""

import sys

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from optuna_fleet import FleetExecutor, HarvestCluster, SharedPipeline

DIGITS = load_digits()
DATA = torch.utils.data.TensorDataset(
    torch.tensor(DIGITS.data / 16, dtype=torch.float32), torch.tensor(DIGITS.target)
)
TRAIN, VAL = torch.utils.data.random_split(DATA, [1500, 297], torch.Generator().manual_seed(0))


def objective(trial):
    width = trial.suggest_int("width", 16, 256, log=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    lr = trial.suggest_float("lr", 0.01, 1, log=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer = trial.prepare(model, optimizer)
    for epoch in trial.epochs(20):
        for x, y in trial.batches("train", batch_size=64):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in trial.batches("val", 64))
        accuracy = float(trial.sum(right)) / len(VAL)
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return accuracy


if __name__ == "__main__":
    cluster = HarvestCluster(partition="preempt") if "harvest" in sys.argv else "slurm"
    study = optuna.create_study(
        study_name="digits",
        storage="sqlite:///digits.db",
        direction="maximize",
        load_if_exists=True,
    )
    with FleetExecutor(
        SharedPipeline(train=TRAIN, val=VAL), cluster=cluster, checkpoints="checkpoints"
    ) as fleet:
        study.optimize(objective, n_trials=40, executor=fleet)
    print(f"{study.best_trial.params}: {study.best_value:.1%}")
