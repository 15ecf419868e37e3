"""TrainingArguments on a fleet."""

from __future__ import annotations

import copy
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.trial import FleetTrial


def arguments_of(args: Any, rank: int) -> Any:
    """A copy for a process that logs and saves if it is rank 0, and nothing between epochs."""
    own = copy.copy(args)
    own.distributed_state = copy.copy(args.distributed_state)  # a copy shares nothing
    own.distributed_state.process_index = own.distributed_state.local_process_index = rank
    own.save_strategy = type(args.save_strategy)("no")
    return own


def check_arguments(args: Any, trial: FleetTrial) -> None:
    """Raise an error for what is done by others on a fleet, or can't be done."""
    if (kind := getattr(args.distributed_state, "distributed_type", "NO")) != "NO":
        raise FleetConfigError(
            f"Accelerate takes this for one of several processes ({kind}), as there are variables "
            "of a launcher in its environment (LOCAL_RANK, WORLD_SIZE, PMI_SIZE, ...): start the "
            "script without torchrun, `accelerate launch` or mpirun."
        )
    if args.device.type != trial.device.type:
        raise FleetConfigError(
            f"TrainingArguments are for {args.device.type!r}, but the trial's device is "
            f"{trial.device.type!r}: leave out `use_cpu` on GPUs, and set it on a fleet of CPUs."
        )
    for name, allowed, advice in _OF_OTHERS:
        value = getattr(args, name, allowed)
        if value and getattr(value, "value", value) != allowed:
            raise FleetConfigError(f"`{name}` is {value!r}, which a trial can't have: {advice}.")


_ONE_DEVICE = "on a fleet each device has the whole model"
_OF_OTHERS = (
    (
        "load_best_model_at_end",
        False,
        "return trial.best_value with a PruningCallback; with FleetExecutor(checkpoints=...) "
        "load_best_model(study) has those weights",
    ),
    ("auto_find_batch_size", False, "suggest the batch size"),
    ("train_sampling_strategy", "random", "the order is SharedPipeline(sampler=...)'s"),
    ("include_num_input_tokens_seen", "no", "each device sees its own samples only"),
    ("deepspeed", None, _ONE_DEVICE),
    ("fsdp", None, _ONE_DEVICE),
    ("parallelism_config", None, _ONE_DEVICE),
)
