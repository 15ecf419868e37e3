"""G4: what goes wrong fails its own trial, says what and where, and leaves the rest alone."""

from __future__ import annotations

import functools
import io
import os
import re
import signal
import socket
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from optuna_fleet import (
    Checkpoints,
    FleetConfigError,
    FleetError,
    FleetExecutor,
    LaunchError,
    Limits,
    PreprocessingError,
    SharedPipeline,
    TrainerLostError,
)
from optuna_fleet.executor.cluster.local import AgentProcess
from optuna_fleet.processes import ModuleProcess
from tests.fleets import (
    Leg,
    Noise,
    fleet_of,
    small_model,
)
from tests.waiting import until

COMPLETE, FAIL, RUNNING = TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING


class OwnError(Exception):
    """An exception of the user's, told apart by `catch=`."""


class TwoArgumentError(OwnError):
    """Can be pickled, but not unpickled: a classic."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.lock = threading.Lock()  # nor can this


class SpeechlessError(Exception):
    """Needs what does not travel to say what it is."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.say = threading.local()
        self.say.word = word

    def __str__(self) -> str:
        return str(self.say.word)


def states(study: optuna.Study) -> dict[int, TrialState]:
    return {trial.number: trial.state for trial in study.trials}


def told(error: BaseException) -> str:
    """All that a user sees of an exception."""
    return "".join(traceback.format_exception(error))


# -- exceptions of objectives --------------------------------------------------------------------


def raise_own(trial: Any) -> None:
    raise OwnError("lr is too brave")


def raise_two_arguments(trial: Any) -> None:
    raise TwoArgumentError("lr", "too brave")


def test_the_log_says_once_why_a_trial_failed_and_where(fleet: Any, log: io.StringIO) -> None:
    """As with plain Optuna: a line, and the traceback, which begins in the objective."""
    optuna.create_study().optimize(raise_own, n_trials=1, catch=OwnError, executor=fleet)
    told = log.getvalue()
    assert told.count("Trial 0 failed with value None.") == 1
    assert (
        told.count("Trial 0 failed with parameters: {} because of the following error: Own") == 1
    )
    assert told.count("OwnError('lr is too brave').") == 1
    assert told.count("OwnError: lr is too brave") == 1
    (frame,) = [line for line in told.splitlines() if line.startswith("  File")]
    assert frame.endswith("in raise_own")


def raise_speechless(trial: Any) -> None:
    raise SpeechlessError("unheard")


def raise_from_a_module_of_the_trainer(trial: Any) -> None:
    module = types.ModuleType("only_in_the_trainer")
    sys.modules[module.__name__] = module
    exec("class LocalError(Exception): pass", vars(module))
    raise module.LocalError("unknown over there")


class ShyError(Exception):
    """Has a text, but no `repr`."""

    def __repr__(self) -> str:
        raise ValueError


def ask_for_what_cannot_be_sent(trial: Any) -> None:
    _ = trial.study._thread_local


def tell_itself(trial: Any, *, state: TrialState) -> float:
    if trial.number == 0:
        trial.study.tell(0, 2.0 if state is COMPLETE else None, state)
        trial.report(1.0, 0)
        trial.should_prune()  # which raises what has become of the report
    return 1.0


@pytest.mark.parametrize("state", [COMPLETE, FAIL])
def test_a_trial_told_by_someone_else_does_not_end_the_sweep(
    fleet: Any, log: io.StringIO, state: TrialState
) -> None:
    study, told = optuna.create_study(), list[int]()
    study.optimize(
        functools.partial(tell_itself, state=state),
        n_trials=6,
        callbacks=[lambda study, trial: told.append(trial.number)],
        executor=fleet,
    )
    assert states(study) == {0: state, **dict.fromkeys(range(1, 6), COMPLETE)}
    assert sorted(told) == list(range(6))
    assert f"Trial 0 stays {state.name}: it was ended elsewhere" in log.getvalue()


# -- objectives that cannot run ------------------------------------------------------------------


def test_a_kept_traceback_does_not_keep_the_executor() -> None:
    """As a notebook keeps the last one, while the cell that makes the executor is run again."""
    executor = FleetExecutor(devices=1, device_type="cpu")
    study = optuna.create_study()
    with pytest.raises(ZeroDivisionError) as by_keyword:
        study.optimize(divide, n_trials=1, executor=executor)
    with pytest.raises(ZeroDivisionError) as by_method:
        executor.optimize(study, divide, n_trials=1)
    left = weakref.ref(executor), weakref.ref(executor._runner)
    del executor
    assert [reference() for reference in left] == [None, None]
    assert by_keyword.tb is not None
    assert by_method.tb is not None


def divide(trial: Any) -> float:
    return 1 / 0


def test_an_objective_that_cannot_be_pickled_is_refused_before_any_trial(
    fleet: Any, tmp_path: Path
) -> None:
    study = optuna.create_study()
    with open(tmp_path / "log", "w") as file:
        for obstacle in (threading.Lock(), file):
            with pytest.raises(FleetConfigError, match="inside the objective"):
                study.optimize(lambda trial: len(str(obstacle)), n_trials=1, executor=fleet)  # noqa: B023
    assert not study.trials
    study.optimize(lambda trial: 1.0, n_trials=1, executor=fleet)


def test_an_objective_that_cannot_be_imported_there_says_so_in_every_trial(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    module = types.ModuleType("only_in_the_driver")
    exec("def objective(trial): return 1.0", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    study = optuna.create_study()
    study.optimize(module.objective, n_trials=9, catch=FleetError, executor=fleet)
    assert states(study) == dict.fromkeys(range(9), FAIL)
    failures = re.findall(r"because of the following error: (.*)", log.getvalue())
    assert len(failures) == 9
    for text in failures:
        assert "can't be loaded" in text
        assert "only_in_the_driver" in text


# -- training ------------------------------------------------------------------------------------


def too_late(trial: Any) -> None:
    for _ in trial.batches("train", batch_size=4):
        trial.prepare(small_model(), min_devices=2)


def raises(error: Exception) -> Callable[[Any], Any]:
    def fail(trial: Any) -> None:
        raise error

    return fail


FAILURES: list[tuple[Callable[[Any], Any], str, list[str]]] = [
    # What cannot be rebuilt here, or cannot travel, or has no words; and more.
    (raise_speechless, "RemoteObjectiveError", ["SpeechlessError: unheard"]),
    (raises(ConnectionRefusedError("the channel raises it too")), "ConnectionRefusedError", []),
    (raises(ShyError("unheard")), "", ["<ShyError, whose repr raises ValueError>"]),
    (lambda trial: (yield 1.0), "could not be cast to float", []),
    (raise_from_a_module_of_the_trainer, "RemoteObjectiveError", ["unknown over there"]),
    (ask_for_what_cannot_be_sent, "", ["pickle"]),
    (too_late, "FleetConfigError", ["`min_devices` is 2", "`max_devices` is 1"]),
]


def fails_in_turn(trial: Any) -> float:
    if trial.number < len(FAILURES):
        return FAILURES[trial.number][0](trial)  # type: ignore[no-any-return]
    return 1.0


def test_what_goes_wrong_in_a_trial_is_told_and_the_others_finish(
    fleet: Any, log: io.StringIO
) -> None:
    study = optuna.create_study()
    number = len(FAILURES)
    study.optimize(fails_in_turn, n_trials=number + 2, catch=Exception, executor=fleet)
    assert [trial.state for trial in study.trials] == number * [FAIL] + 2 * [COMPLETE]
    lines = log.getvalue().splitlines()
    for number, (_, kind, words) in enumerate(FAILURES):
        (why,) = (line for line in lines if line.startswith(f"Trial {number} failed with param"))
        assert kind in why
        assert all(word in log.getvalue() for word in words)


def first_fails(trial: Any) -> float:
    """Trial 0 fails when four have started; the others end after that."""
    if trial.number == 0:
        until(lambda: len(trial.study.trials) == 4)
        raise_two_arguments(trial)
    until(lambda: trial.study.trials[0].state.is_finished())
    return 1.0


def test_what_is_not_caught_is_raised_the_others_finish_and_no_more_begin(fleet: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(TwoArgumentError, match="lr: too brave") as caught:
        study.optimize(first_fails, n_trials=8, executor=fleet)
    assert states(study) == {0: FAIL, 1: COMPLETE, 2: COMPLETE, 3: COMPLETE}
    assert caught.value.place == "lr"
    assert "in raise_two_arguments" in told(caught.value)  # the remote traceback
    study.optimize(raise_two_arguments, n_trials=1, catch=OwnError, executor=fleet)


def big_batch(trial: Any) -> float:
    model = trial.prepare(small_model())
    sizes = [len(images) for images, _ in trial.batches("train", batch_size=1000)]
    with torch.no_grad():
        for images, _ in trial.batches("val", batch_size=1000):
            model(images)
    assert len(trial.batches("train", batch_size=1000)) == 1
    return float(sum(sizes))


def test_a_batch_larger_than_the_data_is_one_batch_and_a_word(
    fleet: Any, log: io.StringIO
) -> None:
    study = optuna.create_study()
    study.optimize(big_batch, n_trials=1, executor=fleet)
    assert study.best_value == 41
    assert "batch_size=1000 is larger than data set 'train'" in log.getvalue()


# -- several devices -----------------------------------------------------------------------------


def one_rank_raises(trial: Any) -> float:
    model = trial.prepare(small_model())
    for epoch in trial.epochs(2):
        for images, labels in trial.batches("train", batch_size=10):
            if epoch == 1 and trial.rank == 1:
                raise OwnError("only here")
            torch.nn.functional.cross_entropy(model(images), labels).backward()
    return 0.0


def test_an_exception_on_one_rank_is_the_trials(fleet: Any) -> None:
    study = optuna.create_study()
    fleet.script = {0: [Leg((0, 1))], 1: [Leg((2,))]}
    with pytest.raises(OwnError, match="only here") as caught:
        study.optimize(one_rank_raises, n_trials=2, executor=fleet)
    assert states(study) == {0: FAIL, 1: COMPLETE}
    assert "trial 0, rank 1, on device 1" in told(caught.value)


# -- kill -9 -------------------------------------------------------------------------------------


def fork(trial: Any, *, do: Callable[[Any], Any]) -> int:
    """The exit code of a process that does so, which a script would leave there."""
    child = os.fork()
    if child == 0:
        return do(trial) or 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("do", "code"),
    [
        (lambda trial: sys.exit(3), 3),
        (lambda trial: trial.report(1.0, 0), 1),  # which is refused
    ],
)
def test_a_process_that_an_objective_forks_is_not_its_trial(
    fleet: Any, do: Callable[[Any], Any], code: int
) -> None:
    study = optuna.create_study()
    study.optimize(functools.partial(fork, do=do), n_trials=2, executor=fleet)
    assert [(t.value, t.intermediate_values) for t in study.trials] == [(code, {})] * 2


def always_die(trial: Any) -> float:
    if trial.number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def test_a_trial_that_kills_its_trainers_is_given_up(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(always_die, n_trials=3, catch=TrainerLostError, executor=fleet)
    assert states(study) == {0: FAIL, 1: COMPLETE, 2: COMPLETE}


# -- one fleet that can be broken ----------------------------------------------------------------


class Broken(Noise):
    """Raises on sample 17."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 17:
            raise OSError(f"sample {index} is unreadable")
        return super().__getitem__(index)


class Deadly(Noise):
    """Kills its preprocessor at sample 3."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.fixture(scope="module")
def breakable() -> Iterator[Any]:
    pipeline = SharedPipeline(
        train=Noise(41, augment=True),
        val=Noise(20),
        broken=Broken(30),
        deadly=Deadly(20),
        shuffled=["train"],
    )
    with fleet_of(devices=2, pipeline=pipeline, limits=Limits(max_restarts=0)) as executor:
        yield executor


def read_all(trial: Any, *, names: list[str], batch_size: int = 5) -> float:
    trial.prepare(small_model())
    name = names[trial.number % len(names)]
    return float(sum(len(images) for images, _ in trial.batches(name, batch_size=batch_size)))


def test_a_sample_that_raises_fails_the_trials_that_read_it(breakable: Any) -> None:
    study = optuna.create_study()
    objective = functools.partial(read_all, names=["broken", "val"])
    study.optimize(objective, n_trials=4, catch=PreprocessingError, executor=breakable)
    assert states(study) == {0: FAIL, 1: COMPLETE, 2: FAIL, 3: COMPLETE}
    with pytest.raises(PreprocessingError) as caught:
        study.optimize(objective, n_trials=1, executor=breakable)
    text = told(caught.value)
    for words in ("trial 4", "Sample 17", "'broken'", "sample 17 is unreadable", "in __getitem__"):
        assert words in text


def test_a_sample_that_kills_its_preprocessors_fails_the_trials_that_read_it(
    breakable: Any,
) -> None:
    study = optuna.create_study()
    objective = functools.partial(read_all, names=["deadly", "val"])
    with pytest.raises(PreprocessingError, match="died over a chunk of data set 'deadly'"):
        study.optimize(objective, n_trials=1, executor=breakable)
    study.optimize(objective, n_trials=1, executor=breakable)
    assert states(study) == {0: FAIL, 1: COMPLETE}


def test_no_restarts_means_none(breakable: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(TrainerLostError, match=r"Trial 0 lost its devices 1 time.*SIGKILL"):
        study.optimize(always_die, n_trials=1, executor=breakable)


def cut_off(trial: Any, *, folder: Path) -> float:
    """Train; the agent's end of the pipeline is gone once, and the agent not yet."""
    model = trial.prepare(small_model())
    for epoch in trial.epochs(3):
        if epoch == 1 and not (folder / "cut").exists():
            (folder / "cut").touch()
            trial._training._pipeline._sock.shutdown(socket.SHUT_RDWR)
        for images, labels in trial.batches("train", batch_size=10):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
        trial.report(epoch, epoch)
    return 1.0


def test_an_agent_whose_end_is_seen_by_a_trainer_first_costs_its_trial_nothing(
    tmp_path: Path, log: io.StringIO
) -> None:
    study = optuna.create_study()
    with fleet_of(
        devices=1, limits=Limits(max_restarts=1), checkpoints=Checkpoints(interval_s=0.0)
    ) as fleet:
        study.optimize(functools.partial(cut_off, folder=tmp_path), n_trials=1, executor=fleet)
    assert states(study) == {0: COMPLETE}
    assert sorted(study.trials[0].intermediate_values) == [0, 1, 2]
    assert "The shared pipeline is gone" in log.getvalue()


# -- what the constructor refuses ----------------------------------------------------------------


def stillborn(agent: AgentProcess, options: Any, threads: int) -> None:
    ModuleProcess.__init__(agent, "optuna_fleet.no_such_module", options, environment={})


def test_an_agent_that_can_not_start_ends_the_call_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AgentProcess, "__init__", stillborn)
    study = optuna.create_study()
    executor = FleetExecutor(devices=1)
    with pytest.raises(LaunchError, match="before any trainer was ready"):
        study.optimize(raise_own, n_trials=1, executor=executor)
    assert "no_such_module" in capfd.readouterr().err
    assert not study.trials
    monkeypatch.undo()
    study.optimize(lambda trial: 0.0, n_trials=1, executor=executor)
    executor.close()
    assert states(study) == {0: COMPLETE}


def test_gpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(FleetConfigError, match=r"0 are visible here.*device_type='cpu'"):
        FleetExecutor(device_type="cuda", devices=2)
