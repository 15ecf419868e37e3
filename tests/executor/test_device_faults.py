"""Devices that fail by themselves: no trial fails for it, and they are left out at last."""

from __future__ import annotations

import gc
import io
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_fleet import (
    FleetConfigError,
    FleetExecutor,
    LaunchError,
    Limits,
    LocalCluster,
    SharedPipeline,
)
from optuna_fleet.exceptions import is_for_want_of_peers, is_of_device, is_out_of_memory
from optuna_fleet.executor.fleet.faults import Faults, NodeFaults
from optuna_fleet.resources import Device
from optuna_fleet.trainer import main
from optuna_fleet.wire.messages import TrainerReady


def own_device() -> Device:
    trainers = (thing for thing in gc.get_objects() if isinstance(thing, main.Trainer))
    return next(trainers)._device


def device_index() -> int:
    return own_device().index


def die_on_one_node(trial: Any) -> float:
    if own_device().node_name == "local-1":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def fail_on_device_1(trial: Any) -> float:
    if device_index() == 1:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    return 1.0


def fail_everywhere(trial: Any) -> float:
    raise RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu.")


@pytest.mark.parametrize(
    ("last_error", "lacks_memory"),
    [
        ("Failed to CUDA calloc async 10485760 bytes", True),
        ("Cuda failure 2 'out of memory'", True),
        ("socketProgress: Connection closed by remote peer", False),
    ],
)
def test_memory_that_nccl_lacks_is_no_want_of_peers(last_error: str, lacks_memory: bool) -> None:
    """The trial would be tried again and again where it does not fit."""
    import torch.distributed as dist

    error = dist.DistBackendError(
        f"NCCL error in: x.cpp:1, unhandled cuda error, Last error:\n{last_error}"
    )
    assert is_out_of_memory(error) is lacks_memory
    assert is_for_want_of_peers(error) is not lacks_memory


def needs_both_devices(trial: Any) -> float:
    import torch

    if device_index() == 1:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    trial.prepare(torch.nn.Linear(1, 1), min_devices=2)
    for _ in trial.epochs(1):
        list(trial.batches("train", batch_size=2))
    return 1.0


@pytest.fixture
def pair() -> Iterator[FleetExecutor]:
    with FleetExecutor(devices=2, device_type="cpu", max_trials=2) as executor:
        yield executor


def test_a_bad_device_fails_no_trial_and_is_left_out(
    pair: FleetExecutor, log: io.StringIO
) -> None:
    study = optuna.create_study()
    runner: Any = pair._runner
    runtime = runner._started(False)
    while len(runtime.trainers.live) < 2:  # or all might be done by one before the other is ready
        for message in runtime.heard(runtime.inbox.get()):
            if isinstance(message, main.TrainerReady):
                runtime.device_events(message)
    study.optimize(fail_on_device_1, n_trials=30, executor=pair)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert "device 1 was aborted: RuntimeError: CUDA error" in log.getvalue()


def test_a_fleet_without_a_device_that_works_ends_the_call(
    pair: FleetExecutor, log: io.StringIO
) -> None:
    study = optuna.create_study()
    with pytest.raises(LaunchError, match=r"No device is left.*CUDA driver initialization"):
        study.optimize(fail_everywhere, n_trials=None, catch=Exception, executor=pair)
    assert "is left out from now on: it has failed 3 times in a row" in log.getvalue()


def test_a_trial_that_needs_more_devices_than_are_left_fails(log: io.StringIO) -> None:
    study = optuna.create_study()
    fleet = FleetExecutor(SharedPipeline(train=[1, 2]), devices=2, device_type="cpu")
    with fleet, pytest.raises(FleetConfigError, match="is 2, but the fleet has 1"):
        study.optimize(needs_both_devices, n_trials=1, executor=fleet)
    assert "Device 1 is left out from now on: it has failed 3 times" in log.getvalue()


# -- nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happens", "trials"),
    [
        ("1 4 7 b", "1, 4, 7"),
        ("4 1 7 4 b", "1, 7, 4"),
        ("1 1 1 4 b", None),  # one that is lost again and again may be to blame itself
        ("1 b1 1 1 b1 1", "1, 1, 1"),  # unless it gets on elsewhere
        ("1 4 a 7 b", None),
        ("b 1 4 7", None),  # what was before its first loss is no evidence against it
        ("1 b a 4 7 9", None),
        ("1 4 7", None),  # else all would be, if the objective is to blame
        ("1 4 7 c", None),  # which is gone: nor is the last one that is there
    ],
)
def test_a_node_that_loses_three_trials_while_another_gets_on_is_left_out_once(
    happens: str, trials: str | None
) -> None:
    """Trials by number: lost on node "a"; letters: this node gets on, by another trial or this."""
    faults = NodeFaults()
    for what in happens.split():
        if what.isdecimal():
            faults.lost("a", int(what), f"of {what}")
        else:
            faults.progressed([what[0]], int(what[1:] or 99))
    bad = faults.take_bad({"a", "b"})
    assert [node for node, _ in bad] == ["a"] * (trials is not None)
    for _, why in bad:
        assert why.startswith(f"trials {trials} were lost there in a row")
        assert why.endswith(f"because of {trials[-1] if trials else ''}")
    assert faults.take_bad({"a", "b"}) == []


def test_only_errors_in_a_row_count() -> None:
    faults = Faults()
    assert [faults.failed("it") for _ in range(2)] == [1, 2]
    faults.worked("it")
    assert [faults.failed("it") for _ in range(2)] == [1, 2]
    assert faults.failed("another") == 1


def test_a_node_whose_trainers_always_die_is_left_out_and_the_user_is_told(
    log: io.StringIO,
) -> None:
    fleet = FleetExecutor(
        devices=1,
        device_type="cpu",
        cluster=LocalCluster(nodes=2),
        limits=Limits(max_restarts=1000),
    )
    runner: Any = fleet._runner

    def stop_once_it_is_left_out(study: optuna.Study, trial: Any) -> None:
        if runner._runtime.faults.left_out:
            study.stop()

    study = optuna.create_study()
    with fleet:
        study.optimize(die_on_one_node, callbacks=[stop_once_it_is_left_out], executor=fleet)
        (bad,) = runner._runtime.faults.left_out
        assert runner._runtime.agents.node_of(bad) == "local-1"
        study.optimize(die_on_one_node, n_trials=2, executor=fleet)
        summary = str(fleet.summary)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert "Node local-1 is left out from now on: trials " in log.getvalue()
    assert "node local-1 was left out: trials " in summary
    assert "its trainer ended with signal SIGKILL" in summary


@pytest.mark.parametrize(
    ("text", "is_its_own"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
    ],
)
def test_errors_of_the_program_are_not_the_devices(text: str, is_its_own: bool) -> None:
    assert is_of_device(RuntimeError(text)) == is_its_own
    assert not is_of_device(ValueError(text))


def test_a_trainer_whose_device_does_not_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(main, "connect", lambda *_: SimpleNamespace(send=sent.append))
    monkeypatch.setattr(main, "ailment_of", lambda device: "it is unplugged")
    device = Device(index=3, node=0, kind="cpu")
    where: Any = {"agent": "", "invitation": None, "data": None}
    main.trainer_main(device, **where, spec=None, num_threads=1)
    (message,) = sent
    assert isinstance(message, TrainerReady)
    assert (message.device, message.problem) == (3, "it is unplugged")


class OnFailedGpu:
    """Memory that aborts the process if it is freed once the GPU has failed, as pinned memory."""

    def __del__(self) -> None:
        os.abort()


def asserts_on_its_gpu(trial: Any) -> float:
    import torch

    def fail() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    memory = OnFailedGpu()
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_stream = torch.cuda.synchronize = fail
    fail()
    return float(memory is None)


def test_an_error_that_spoils_a_gpu_is_told_before_the_process_ends() -> None:
    study = optuna.create_study()
    with FleetExecutor(devices=1, device_type="cpu") as fleet:
        study.optimize(asserts_on_its_gpu, n_trials=1, catch=RuntimeError, executor=fleet)
        study.optimize(lambda trial: 1.0, n_trials=1, executor=fleet)  # another process
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_gpu_that_torch_can_not_use_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def ones(number: int, device: str) -> Any:
        raise RuntimeError("no CUDA-capable device is detected")

    monkeypatch.setattr(torch, "ones", ones)
    gpu = Device(index=0, node=0, kind="NVIDIA H200", visible="0")
    assert main.ailment_of(gpu) == "RuntimeError: no CUDA-capable device is detected"
    assert main.ailment_of(Device(index=0, node=0, kind="cpu")) == ""
