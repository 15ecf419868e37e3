"""What a script sets holds in its objectives, though these run in other processes."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet.exceptions import FleetError
from optuna_fleet.settings import Adoption, settings_here, workplace_here
from tests.fleets import Leg


class HomeMadeWarning(UserWarning):
    """A category of the script's own."""


def found() -> dict[str, Any]:
    """What a process is set to, as JSON has it."""
    matmul = torch.backends.cuda.matmul
    return {
        "dtype": str(torch.empty(0).dtype),
        "device": torch.empty(0).device.type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "precision": torch.get_float32_matmul_precision(),
        "tf32": matmul.allow_tf32,
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        "threads": torch.get_num_threads(),
        "warned": [warned(UserWarning, "about this"), warned(HomeMadeWarning, "of mine")],
        "levels": [logging.getLogger(name).level for name in (None, "a.b", "optuna")],
    }


def warned(category: type[Warning], text: str) -> str:
    """What becomes of a warning."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn(text, category, stacklevel=1)
    except Warning:
        return "raised"
    return "shown" if caught else "ignored"


def tells(trial: Any) -> float:
    trial.set_user_attr("found", found())
    torch.set_default_dtype(torch.float16)  # of no concern to the next trial
    return 0.0


def in_a_trial(fleet: Any, *legs: Leg) -> Any:
    """What the objective finds, in two trials that fly so, whatever the first changes."""
    fleet.script = {0: legs, 1: legs}
    study = optuna.create_study()
    study.optimize(tells, n_trials=2, executor=fleet)
    first, second = (trial.user_attrs["found"] for trial in study.trials)
    assert first == second
    return first


@contextlib.contextmanager
def everything_set() -> Iterator[None]:
    """Everything in this process set to something else, and in the end as it was."""
    before, here = settings_here(), Adoption(has_gpu=False)
    here.adopt_torch(before)  # notes what torch is set to
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "about t", UserWarning)
        warnings.filterwarnings("error", category=HomeMadeWarning)
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("a.b").setLevel(5)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
    finally:
        here.adopt(before)
        here.adopt_torch(before)
        torch.set_num_threads(before.num_threads or 1)
        logging.getLogger("a.b").setLevel(logging.NOTSET)


def test_where_another_node_has_no_such_folder_a_sentence_says_so() -> None:
    place = replace(workplace_here(), folder="/no/such/folder", variables={})
    with pytest.raises(FleetError, match="has no folder /no/such/folder, where the script is at"):
        place.take_on()


@pytest.mark.parametrize("legs", [[Leg((0,))], [Leg((1, 2))]])
def test_an_objective_finds_what_its_script_has_set(fleet: Any, legs: list[Leg]) -> None:
    plain = found()
    at_first = in_a_trial(fleet, *legs)
    assert {**at_first, "threads": 0} == {**plain, "threads": 0}
    with everything_set():
        changed = found()
        assert in_a_trial(fleet, *legs) == changed
    assert all(changed[name] != plain[name] for name in changed.keys() - {"threads"})
    assert in_a_trial(fleet, *legs) == at_first
