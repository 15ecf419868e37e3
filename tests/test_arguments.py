"""What a user gives."""

from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from optuna_fleet import Convergence, FleetConfigError, FleetExecutor
from optuna_fleet.alloc import MipAllocator
from optuna_fleet.arguments import check_number


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"alpha": "0.5"}, "`alpha` is '0.5', but must be a number > 0 and <= 1."),
        ({"alpha": 1.5}, "`alpha` is 1.5, but must be a number > 0 and <= 1."),
        ({"max_restarts": 1.5}, "`max_restarts` is 1.5, but must be a whole number >= 0."),
        ({"max_restarts": None}, "`max_restarts` is None, but must be a whole number >= 0."),
        ({"trial_timeout_s": "3"}, "`trial_timeout_s` is '3', but must be a number > 0, or None."),
        ({"storage_patience_s": float("nan")}, "is nan, but must be a number >= 0."),
        ({"keep_checkpoints": True}, "is True, but must be a whole number >= 0."),
        ({"seed": -1}, "`seed` is -1, but must be a whole number >= 0."),
        ({"convergence": 5}, "`convergence` is 5, but must be a Convergence, as Convergence(pat"),
        ({"convergence": Convergence}, "must be a Convergence, as Convergence(patience=5)"),
        ({"allocator": MipAllocator}, "must have a method `allocate`, as the object"),
        ({"predictor": 5}, "`predictor` is 5, but must be a function from an optuna.trial.Fro"),
        ({"phases": "no"}, "`phases` is 'no', but must be True or False."),
        ({"policy": ["mip"]}, "`policy` is ['mip'], but must be one of 'baseline'"),
        ({"checkpoint_dir": 5}, "`checkpoint_dir` is 5, but must be the path of a folder"),
        ({"checkpoint_dir": __file__}, "must be a folder, or one that can be made ([Errno"),
        ({"checkpoint_dir": Path(__file__, "in it")}, "directory"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_wanted(arguments, complaint) -> None:
    with pytest.raises(FleetConfigError) as caught:
        FleetExecutor(devices=1, device_type="cpu", **arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("value", [3, np.int64(3), 3.0, np.float32(3), float("inf")])
def test_numbers_of_all_kinds_will_do(value) -> None:
    check_number("x", value, least=3)


@pytest.mark.parametrize("value", ["3", np.zeros(2), [3], float("nan"), 3 + 0j, True])
def test_what_is_no_number_is_refused_in_words(value) -> None:
    with pytest.raises(FleetConfigError, match=r"`x` is .*, but must be a number >= 0"):
        check_number("x", value, least=0)


def test_none_will_do_where_it_is_optional() -> None:
    check_number("x", None, above=0, optional=True)


@pytest.mark.parametrize("executor", [2, FleetExecutor, optuna.create_study()])
def test_what_is_no_executor_is_refused_in_words(executor: Any) -> None:
    with pytest.raises(FleetConfigError, match=r"`executor` is .* must be a FleetExecutor, as"):
        optuna.create_study().optimize(lambda trial: 0.0, n_trials=1, executor=executor)


def set_state(trial: Any) -> float:
    trial.state = {"best": 0.0}
    return 0.0


def test_a_state_that_is_set_says_what_to_use(fleet: Any) -> None:
    with pytest.raises(AttributeError, match=r"use trial\.state\.update\(\.\.\.\), or "):
        optuna.create_study().optimize(set_state, n_trials=1, executor=fleet)


def forget_batch_size(trial: Any) -> float:
    trial.prepare(torch.nn.Linear(1, 1))
    return float(len(trial.batches("val")))


def test_a_batch_size_that_is_missing_is_asked_for(fleet: Any) -> None:
    with pytest.raises(FleetConfigError, match=r"trial\.batches\('val', batch_size=\.\.\.\)"):
        optuna.create_study().optimize(forget_batch_size, n_trials=1, executor=fleet)
