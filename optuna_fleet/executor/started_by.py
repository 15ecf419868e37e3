"""Who started this process: a sweep runs in one that its user did."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping

from optuna_fleet.exceptions import FleetConfigError

# By whom, how many processes there are, and which of them this is: the first that fits counts.
_LAUNCHERS = (
    ("`accelerate launch`", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"),
    ("A launcher", "", "WORLD_SIZE", "RANK"),
    ("mpirun", "", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpirun", "", "PMI_SIZE", "PMI_RANK"),
    ("srun", "", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("horovodrun", "", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("Lightning's Trainer(devices=...)", "", "WORLD_SIZE", "LOCAL_RANK"),
)


def check_is_one_process(variables: Mapping[str, str]) -> None:
    """Raise where each of several processes would run the whole sweep.

    Raises:
        FleetConfigError: A launcher, or an objective, has started this process beside others.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise FleetConfigError(
            "A process that was started by 'spawn' or 'forkserver' runs this script again, up to "
            '`study.optimize(...)`: put that under `if __name__ == "__main__":`.'
        )
    for launcher, mark, size, rank in _LAUNCHERS:
        number, which = variables.get(size, ""), variables.get(rank, "")
        if (not mark or mark in variables) and which and number.isdecimal() and int(number) > 1:
            raise FleetConfigError(
                f"{launcher} has started this script as process {which} of {number} ({rank}, "
                f"{size}), each of which would run the whole sweep. Start it once, as in `python "
                "script.py`: the executor starts the processes of all devices itself, on several "
                "machines with SlurmCluster() or JoinCluster()."
            )
