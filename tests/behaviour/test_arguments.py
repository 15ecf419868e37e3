"""What a user gives: what is wrong is named, with what was wanted."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from optuna_fleet import (
    Checkpoints,
    Convergence,
    FleetConfigError,
    FleetExecutor,
    HarvestCluster,
    JoinCluster,
    Limits,
    LocalCluster,
    load_best_model,
)
from optuna_fleet.alloc import MipAllocator
from optuna_fleet.policies import Elastic, Mip, Own


@pytest.mark.parametrize(
    ("kind", "arguments", "complaint"),
    [
        (Mip, {"alpha": 1.5}, "`alpha` is 1.5, but must be a number > 0 and <= 1."),
        (Mip, {"rate_spread": 0.5}, "`rate_spread` is 0.5, but must be a number >= 1."),
        (Mip, {"time_limit_s": -1.0}, "`time_limit_s` is -1.0, but must be a number > 0."),
        (Mip, {"phases": "no"}, "`phases` is 'no', but must be True or False."),
        (Mip, {"paradigm": ""}, "`paradigm` is '', but must be one of 'global', "),
        (Elastic, {"rescale_s": -1.0}, "`rescale_s` is -1.0, but must be a number >= 0."),
        (Elastic, {"objective": "best"}, "`objective` is 'best', but must be one of"),
        (Own, {"allocator": MipAllocator}, "must have a method `allocate`, as the object"),
        (Limits, {"max_restarts": 1.5}, "`max_restarts` is 1.5, but must be a whole number >= 0."),
        (Limits, {"hang_s": 0}, "`hang_s` is 0, but must be a number > 0, or None."),
        (Limits, {"trial_memory_bytes": 0}, "`trial_memory_bytes` is 0, but must be a number > 0"),
        (Limits, {"trial_s": "3"}, "`trial_s` is '3', but must be a number > 0, or None."),
        (Limits, {"storage_patience_s": math.nan}, "is nan, but must be a number >= 0."),
        (Checkpoints, {"keep": True}, "is True, but must be a whole number >= 0."),
        (Checkpoints, {"folder": ""}, "`folder` is '', but must be the path of a folder"),
        (FleetExecutor, {"checkpoints": 5}, "`checkpoints` is 5, but must be the path of a"),
        (FleetExecutor, {"checkpoints": __file__}, "must be a folder, or one that can be made"),
        (FleetExecutor, {"checkpoints": Path(__file__, "in it")}, "directory"),
        (FleetExecutor, {"devices": [0, 1]}, "CUDA_VISIBLE_DEVICES says which"),
        (FleetExecutor, {"devices": 0}, "`devices` is 0, but must be a whole number >= 1"),
        (FleetExecutor, {"devices": 10**40}, "must be a whole number >= 1 and <= 10000, or None."),
        (LocalCluster, {"nodes": 10**40}, "must be a whole number >= 1 and <= 1000."),
        (Convergence, {"patience": 0}, "`patience` is 0, but must be a whole number >= 1."),
        (Convergence, {"patience": 5, "min_improvement": None}, "is None, but must be a number"),
        (JoinCluster, {"file": 3}, "`file` is 3, but must be the path of a file, as a string"),
        (HarvestCluster, {"time_limit_s": math.inf}, "`time_limit_s` is inf, but must be a nu"),
        (FleetExecutor, {"max_trials": 0}, "`max_trials` is 0"),
        (FleetExecutor, {"seed": -1}, "`seed` is -1, but must be a whole number >= 0."),
        (FleetExecutor, {"limits": 60}, "`limits` is 60, but must be a Limits, as Limits(hang_s"),
        (FleetExecutor, {"convergence": 5}, "must be a Convergence, as Convergence(patience=5)"),
        (FleetExecutor, {"predictor": 5}, "`predictor` is 5, but must be a function from an"),
        (FleetExecutor, {"setup": 3}, "but must be a function without arguments"),
        (FleetExecutor, {"pipeline": [1]}, "was given a `list`, but takes a SharedPipeline"),
        (FleetExecutor, {"policy": ["mip"]}, "`policy` is ['mip'], but must be one of 'baseline'"),
        (FleetExecutor, {"policy": "elastics"}, "did you mean `elastic`?"),
        (FleetExecutor, {"cluster": "slrum"}, "'ray'; did you mean `slurm`?"),
        (FleetExecutor, {"policy": Mip}, "or an object as optuna_fleet.policies.Mip(alpha=0.5)"),
        (FleetExecutor, {"cluster": np.zeros(2)}, "but must be one of 'local', 'inline',"),
        (FleetExecutor, {"cluster": "inline", "devices": 0}, "`devices` is 0, but must be"),
        (FleetExecutor, {"device_type": ["cpu"]}, "but must be 'cpu' or 'cuda'."),
        (FleetExecutor, {"device_type": "tpu"}, "`device_type` is 'tpu'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_wanted(kind, arguments, complaint) -> None:
    if kind is FleetExecutor:
        arguments = {"devices": 1, "device_type": "cpu"} | arguments
    with pytest.raises(FleetConfigError) as caught:
        kind(**arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"study": "name"}, "`study` is 'name', but must be a study"),
        ({"model": "net"}, "`model` is 'net', but must be a torch.nn.Module"),
        ({"model": torch.nn.Linear}, "`model` is .*, but must be a torch.nn.Module"),
        ({"trial": "3"}, "`trial` is '3', but must be a whole number"),
        ({"trial": optuna.trial.create_trial(value=0)}, "`trial` is Froz.*must be a whole number"),
        ({"trial": 3}, "`trial` is 3, but the study has 1 trials"),
        ({"folder": 3}, "`folder` is 3, but must be the path of a folder"),
        ({"folder": ""}, "`folder` is '', but must be the path of a folder"),
    ],
)
def test_a_wrong_argument_of_load_best_model_is_named(arguments: Any, words: str) -> None:
    study = optuna.create_study()
    study.add_trial(optuna.trial.create_trial(value=0))
    with pytest.raises(FleetConfigError, match=words):
        load_best_model(**{"study": study, **arguments})


def test_numbers_of_all_kinds_will_do_and_nothing_else() -> None:
    for value in (3, np.int64(3), 3.0, np.float32(3), math.inf):
        assert Limits(hang_s=value).hang_s == value
    for value in ("3", np.zeros(2), [3], math.nan, 3 + 0j, True):
        with pytest.raises(FleetConfigError, match=r"`hang_s` is .*, but must be a number > 0"):
            Limits(hang_s=value)
    with pytest.raises(FleetConfigError, match="`max_restarts` is an integer that is too large"):
        Limits(max_restarts=10**5000)


@pytest.mark.parametrize("executor", [2, FleetExecutor, optuna.create_study()])
def test_what_is_no_executor_is_refused(executor: Any) -> None:
    with pytest.raises(FleetConfigError, match=r"`executor` is .* must be a FleetExecutor, as"):
        optuna.create_study().optimize(lambda trial: 0.0, n_trials=1, executor=executor)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"n_trials": "3"}, "`n_trials` is '3', but must be a number, or None."),
        ({"timeout": "1h"}, "`timeout` is '1h', but must be a number, or None."),
        ({"callbacks": print}, "but must be a list of functions, as [callback]."),
        ({"callbacks": [print, None]}, "None], but must be a list of functions, as [callback]."),
        ({"catch": "ValueError"}, "`catch` has 'ValueError', but must be exception classes"),
        ({"catch": None}, "`catch` has None, but must be exception classes"),
        ({"catch": ValueError()}, "`catch` has ValueError(), but must be exception classes"),
    ],
)
def test_what_would_fail_after_the_first_trial_is_refused_before(
    arguments: Any, complaint: str
) -> None:
    study = optuna.create_study()
    with pytest.raises((FleetConfigError, TypeError)) as caught:
        study.optimize(
            lambda trial: 0.0, **{"n_trials": 1, **arguments}, executor=FleetExecutor(devices=1)
        )
    assert complaint in str(caught.value)
    assert not study.trials


WRONG_CALLS = (
    (lambda trial: trial.prepare(), "trial.prepare() was given nothing, but takes modules"),
    (lambda trial: trial.prepare(5), "trial.prepare() was given a `int`, but takes modules"),
    (lambda trial: trial.prepare(max_device=2), "a `int` as `max_device`, but takes"),
    (
        lambda trial: trial.prepare(torch.nn.LazyLinear(1)),
        "The tensor 'weight' of LazyLinear is lazy, but must be initialised: run one batch",
    ),
    (lambda trial: trial.prepare([torch.nn.Linear(1, 1)]), "each by itself"),
    (
        lambda trial: trial.prepare(torch.nn.Sequential(torch.nn.DataParallel(torch.nn.ReLU()))),
        "trial.prepare() was given what is in a `DataParallel`, but trains modules data parallel",
    ),
    (lambda trial: trial.prepare(torch.nn.Linear), "was given a `class Linear`, but takes"),
    (lambda trial: trial.epochs("3"), "`num_epochs` is '3', but must be a whole number >= 1."),
    (lambda trial: trial.epochs(True), "`num_epochs` is True, but must be"),
    (lambda trial: trial.epochs(0), "`num_epochs` is 0, but must be"),
    (lambda trial: trial.batches("val"), "trial.batches('val', batch_size=...)"),
    (lambda trial: trial.batches("val", batch_size="3"), "`batch_size` is '3', but must be"),
    (lambda trial: trial.batches("val", batch_size=3, drop_last=1), "`drop_last` is 1, but must"),
    (lambda trial: trial.batches("vla", batch_size=3), "There is no data set 'vla' in the Shared"),
    (lambda trial: trial.batches(None, batch_size=3), "`name` is None, but must be the name of"),
)


def call_wrongly(trial: Any) -> float:
    trial.prepare(torch.nn.Linear(1, 1))
    assert list(trial.epochs(np.int64(2))) == [0, 1]  # numbers of all kinds will do
    for call, words in WRONG_CALLS:
        with pytest.raises(FleetConfigError) as caught:
            call(trial)
        assert words in str(caught.value)
    return 0.0


def test_a_wrong_argument_of_a_trials_method_is_named(fleet: Any) -> None:
    optuna.create_study().optimize(call_wrongly, n_trials=1, executor=fleet)


def join_a_second_group(trial: Any) -> float:
    torch.distributed.init_process_group("gloo")
    return 0.0


def test_what_is_left_over_from_torchrun_says_what_to_do(fleet: Any) -> None:
    with pytest.raises(ValueError, match=r"twice!.* leave out `init_process_group`"):
        optuna.create_study().optimize(join_a_second_group, n_trials=1, executor=fleet)


# -- a script that a launcher starts several times would run as many sweeps -----------------------

SEVERAL: list[tuple[str, dict[str, str]]] = [
    ("torchrun", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}),
    (
        "`accelerate launch`",
        {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2", "RANK": "1"},
    ),
    ("A launcher", {"WORLD_SIZE": "16", "RANK": "3"}),
    ("mpirun", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}),
    ("mpirun", {"PMI_SIZE": "4", "PMI_RANK": "2"}),
    ("srun", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}),
    ("horovodrun", {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}),
    ("Lightning's Trainer(devices=...)", {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}),
]
ALONE: list[dict[str, str]] = [
    {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1", "RANK": "0"},
    {"WORLD_SIZE": "8"},  # of no launcher: they all say which process it is
    {"WORLD_SIZE": "many", "RANK": "0"},
    {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
]


@pytest.mark.parametrize(("launcher", "variables"), SEVERAL)
def test_one_of_several_processes_is_told_to_be_started_once(
    launcher: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    study, inline = optuna.create_study(), FleetExecutor(cluster="inline")
    with pytest.raises(FleetConfigError, match=r"Start it once, as in `python script\.py`") as no:
        study.optimize(lambda trial: 0.0, n_trials=1, executor=inline)
    assert str(no.value).startswith(f"{launcher} has started this script as process ")
    with pytest.raises(FleetConfigError, match=re.escape(launcher)):
        inline.evaluate(lambda trial: 0.0, {})
    assert study.trials == []


@pytest.mark.parametrize("variables", ALONE)
def test_one_alone_runs_its_sweep(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    study, inline = optuna.create_study(), FleetExecutor(cluster="inline")
    study.optimize(lambda trial: 0.0, n_trials=1, executor=inline)
    assert len(study.trials) == 1
