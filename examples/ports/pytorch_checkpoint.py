"""Trials that survive their process: Optuna's artifacts, heartbeats and retries.

python examples/ports/pytorch_checkpoint.py [--fleet]  # kill it, and start it again

Once a trial's heartbeat is overdue it is retried, from the checkpoint of its last epoch.
"""

import tempfile
from pathlib import Path

import optuna
import torch
import torch.nn.functional as F
from digits_data import get_loaders, parse_arguments, print_summary
from optuna.artifacts import FileSystemArtifactStore, download_artifact, upload_artifact
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from torch import nn

from optuna_fleet import FleetExecutor

FOLDER = Path("checkpoint_study")
EPOCHS = 10

artifact_store = FileSystemArtifactStore(FOLDER)


def save_checkpoint(trial, content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save(content, path)
        artifact_id = upload_artifact(
            artifact_store=artifact_store, file_path=str(path), study_or_trial=trial
        )
    trial.set_user_attr("checkpoint", artifact_id)


def load_checkpoint(artifact_id):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        download_artifact(
            artifact_store=artifact_store, artifact_id=artifact_id, file_path=str(path)
        )
        return torch.load(path, weights_only=True)


def objective(trial):
    torch.manual_seed(trial.number)
    hidden = trial.suggest_int("hidden", 8, 128, log=True)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    train_loader, val_loader = get_loaders(batch_size=32)

    first_epoch = 0
    if "checkpoint" in trial.user_attrs:  # a retry inherits them
        checkpoint = load_checkpoint(trial.user_attrs["checkpoint"])
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch, accuracy = checkpoint["epoch"] + 1, checkpoint["accuracy"]

    for epoch in range(first_epoch, EPOCHS):
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        with torch.no_grad():
            right = [model(images).argmax(dim=1) == labels for images, labels in val_loader]
        accuracy = float(torch.cat(right).float().mean())

        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(trial, {"epoch": epoch, "accuracy": accuracy, **states})
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def main():
    arguments = parse_arguments(__doc__)
    FOLDER.mkdir(exist_ok=True)
    storage = RDBStorage(
        arguments.storage or f"sqlite:///{FOLDER}/study.db",
        heartbeat_interval=5,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=3),
    )
    study = optuna.create_study(
        direction="maximize", storage=storage, study_name="checkpoint", load_if_exists=True
    )
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
