"""What runs short on a machine (processes, descriptors, memory) costs time, not the node."""

import optuna
import pytest
import torch
from pipeline_datasets import Counted
from standalone_harness import read

from optuna_fleet import FleetError, FleetExecutor, SharedPipeline
from tests.nursery import FIRST

_FAILING = """
import errno, os, socket, sys

here = os.getpid()

def failing(call, times, number, skipped=0):
    left = [None] * (times + skipped)
    def may_fail(*args, **more):
        if os.getpid() == here and len(left) > times:
            left.pop()
        elif os.getpid() == here and left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return call(*args, **more)
    return may_fail

if {fork}:
    os.fork = failing(os.fork, {fork}, errno.EAGAIN)
if {pidfd_open}:
    os.pidfd_open = failing(os.pidfd_open, {pidfd_open}, errno.EMFILE, skipped=1)

socket.send_fds = failing(socket.send_fds, {send}, errno.ENOBUFS)
"""


@pytest.fixture
def short(tmp_path, monkeypatch):
    """Has calls fail a few times in each agent and each server."""

    def fail(*, fork=0, pidfd_open=0, send=0):
        code = _FAILING.format(fork=fork, pidfd_open=pidfd_open, send=send)
        (tmp_path / "first.py").write_text(code)
        monkeypatch.setenv(FIRST, str(tmp_path / "first.py"))

    return fail


def indices(pipeline):
    return sorted(int(i) for _, labels in read(pipeline) for i in labels)


ALL = list(range(100))


def test_a_pipeline_goes_on_when_there_is_enough_again(short):
    short(fork=1, pidfd_open=1)
    with SharedPipeline(train=Counted(100), num_preprocessors=1) as pipeline:
        assert indices(pipeline) == ALL


def test_an_error_of_one_connection_is_its_own(short):
    short(send=1)
    with SharedPipeline(train=Counted(100), num_preprocessors=1) as pipeline:
        with pytest.raises(FleetError, match="is gone"):
            indices(pipeline)
        assert indices(pipeline) == ALL


def test_a_fleet_goes_on_when_there_is_enough_again(short):
    short(fork=2)

    def objective(trial):
        trial.prepare(torch.nn.Linear(1, 1))
        return float(sum(len(labels) for _, labels in trial.batches("train", batch_size=9)))

    study = optuna.create_study()
    with FleetExecutor(SharedPipeline(train=Counted(100)), devices=2, device_type="cpu") as fleet:
        study.optimize(objective, n_trials=3, executor=fleet)
    assert [trial.value for trial in study.trials] == [100.0] * 3
