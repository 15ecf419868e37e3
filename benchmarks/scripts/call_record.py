"""Writing down how a call with 16 trials under way is getting on: milliseconds, by storage."""

from __future__ import annotations

import json
import sys
import tempfile
import time

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from optuna_fleet.sampler_bridge.records import CallState, RunState, record_call


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    runs = tuple(
        RunState(trial=n, devices=(n,), start=1.0, max_epochs=90, epoch_s=60.0, samples_per_s=1e3)
        for n in range(16)
    )
    state = CallState(began=1.0, noted=1.0, every_s=2.0, n_trials=1000, runs=runs)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        storages = {
            "in memory": None,
            "journal file": JournalStorage(JournalFileBackend(f"{folder}/journal")),
            "SQLite": RDBStorage(f"sqlite:///{folder}/study.db"),
        }
        for name, storage in storages.items():
            study = optuna.create_study(storage=storage)
            for _ in range(int(sys.argv[1])):
                began = time.perf_counter()
                assert record_call(study, state)
                times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
    print(json.dumps(times))


if __name__ == "__main__":
    main()
