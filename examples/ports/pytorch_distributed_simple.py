"""Data-parallel trials by `torch.distributed`: `TorchDistributedTrial`, DDP, collectives.

torchrun --nproc-per-node 2 examples/ports/pytorch_distributed_simple.py
python examples/ports/pytorch_distributed_simple.py --fleet

The first trains each trial on both processes, one trial after the other; the second trains the
same objective on one device per trial, trials side by side. pytorch_distributed_fleet.py is this
file with trials that can use several devices each.
"""

import contextlib

import optuna
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_data import load_datasets, parse_arguments, print_summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from optuna_fleet import FleetExecutor

try:
    from optuna_integration import TorchDistributedTrial
except ImportError as error:
    raise SystemExit(f"{error}; please: pip install optuna-integration") from None

BATCH_SIZE = 32
EPOCHS = 5


def objective(trial):
    trial = TorchDistributedTrial(trial)
    torch.manual_seed(trial.number)
    hidden = trial.suggest_int("hidden", 8, 128, log=True)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    model = DistributedDataParallel(model)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    train, val = load_datasets()
    train_sampler = DistributedSampler(train)
    val_sampler = DistributedSampler(val, shuffle=False)
    train_loader = DataLoader(train, BATCH_SIZE // dist.get_world_size(), sampler=train_sampler)
    val_loader = DataLoader(val, BATCH_SIZE, sampler=val_sampler)

    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        counts = torch.zeros(2)  # right ones, all
        with torch.no_grad():
            for images, labels in val_loader:
                right = model(images).argmax(dim=1) == labels
                counts += torch.tensor([right.sum(), len(labels)])
        dist.all_reduce(counts)
        accuracy = float(counts[0] / counts[1])

        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def optimize_together(n_trials, storage):
    """Run every trial on all processes that torchrun started; only rank 0 has the study."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        study = optuna.create_study(direction="maximize", storage=storage)
        study.optimize(objective, n_trials=n_trials)
        print_summary(study)
    else:
        for _ in range(n_trials):
            with contextlib.suppress(optuna.TrialPruned):
                objective(None)
    dist.destroy_process_group()


def main():
    arguments = parse_arguments(__doc__)
    if arguments.fleet:
        study = optuna.create_study(direction="maximize", storage=arguments.storage)
        executor = FleetExecutor(devices=arguments.devices)
        study.optimize(objective, n_trials=arguments.trials, executor=executor)
        print_summary(study)
    else:
        optimize_together(arguments.trials, arguments.storage)


if __name__ == "__main__":
    main()
