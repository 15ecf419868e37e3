"""Checkpoints travel over the channel where a trainer does not see the driver's folder."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import optuna
import pytest

from optuna_fleet import Checkpoints, FleetConfigError, load_best_model
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.checkpoints.store import mark
from optuna_fleet.executor.call import sweep
from optuna_fleet.executor.cluster.agent import entry
from optuna_fleet.executor.cluster.config import AgentOptions
from optuna_fleet.trainer.checkpoint import Captured, Checkpoint, captured
from optuna_fleet.trainer.saving import RunFiles
from optuna_fleet.wire import transfer
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.node_messages import Refused
from optuna_fleet.wire.transfer import Get, Put, TransferServer
from tests.executor.orders import run_trial
from tests.fleets import Leg, fleet_of, small_model, train
from tests.test_channel import tls_pair

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TransferServer]:
    server = TransferServer(tmp_path)
    yield server
    server.close()
    assert server._at_work == {}


class Opened(Channel):
    """A connection that is handed over once it has said what it is for."""

    def __init__(self, server: TransferServer) -> None:
        ours, theirs = tls_pair()
        super().__init__(ours)
        self._server, self._theirs = server, [Channel(theirs)]

    def send(self, message: Any) -> None:
        super().send(message)
        while self._theirs:
            theirs = self._theirs.pop()
            self._server.serve(theirs, theirs.receive())


def served_by(server: TransferServer) -> Channel:
    """The other end of a connection to it."""
    return Opened(server)


def files_of(folder: StudyFolder, dial: Callable[[], Channel]) -> RunFiles:
    run = run_trial(folder.path, number=7, study_name=folder.study_name, folder_token="other")
    return RunFiles(run, dial)


def made(data: bytes = DATA) -> Captured:
    content = Checkpoint(loop=1, epoch=5, objects=[], state={"data": data}, rng=[], history={})
    return captured(content)


def write(files: RunFiles, data: bytes = DATA) -> str:
    return files.write((1, 5), "", made(data))


# -- one file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        Get(study="s", name="../../etc/passwd"),
        Get(study="s", name="call.json"),
        Put(study="s", name="trial-7.final.pt"),
        Put(study="s", name="/tmp/trial-7.1-5.0123abcd-0.pt"),
    ],
)
def test_what_is_no_checkpoint_of_a_run_is_refused(server: TransferServer, request_: Any) -> None:
    channel = served_by(server)
    channel.send(request_)
    answer = channel.receive()
    channel.close()
    assert isinstance(answer, Refused)
    assert "is no checkpoint" in answer.problem


def test_a_node_whose_data_sets_are_refused_says_so(
    server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "connect", lambda _: served_by(server))
    setup: Any = SimpleNamespace(pipeline=SimpleNamespace(payload=None))
    invitation: Any = None
    with pytest.raises(FleetConfigError, match=r"\w can't fetch the data sets .* There are none"):
        entry._with_data(setup, invitation)


@pytest.mark.parametrize("full", ["No space left", "MemoryError"])
def test_a_node_without_memory_for_the_data_sets_says_so_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    (tmp_path / "data").write_bytes(DATA)
    server = TransferServer(tmp_path, lambda: str(tmp_path / "data"))
    setup: Any = SimpleNamespace(pipeline=SimpleNamespace(payload=None), needed=())
    driver = mock.Mock(receive=lambda: setup)
    ways = [driver, served_by(server)]
    monkeypatch.setattr(entry, "connect", lambda _: ways.pop(0))
    monkeypatch.setattr(entry, "local_address", lambda channel: "127.0.0.1")
    monkeypatch.setattr(entry, "_adopt", lambda setup, host: None)
    if full == "MemoryError":
        monkeypatch.setattr(entry, "receive_file", mock.Mock(side_effect=MemoryError))
    else:
        monkeypatch.setattr(os, "memfd_create", lambda *_: os.open("/dev/full", os.O_WRONLY))
    options = AgentOptions(invitation=mock.Mock(), node="here", devices=1, device_type="cpu")
    with pytest.raises(FleetConfigError, match=rf"no memory for the data sets .*{full}"):
        entry.run_agent(options)
    (said,) = (c.args[0] for c in driver.send.mock_calls if hasattr(c.args[0], "problem"))
    assert "no memory for the data sets" in said.problem
    server.close()


@pytest.mark.parametrize("ends", ["gone", "closed"])
def test_half_a_file_leaves_what_was_there(
    server: TransferServer, tmp_path: Path, ends: str
) -> None:
    folder = StudyFolder(tmp_path, "a study")
    before = Path(write(files_of(folder, functools.partial(served_by, server))))
    was = before.read_bytes()
    channel = served_by(server)
    channel.send(Put(study="a study", name=before.name))
    channel.send(b"other")
    if ends == "closed":
        server.close()
        assert hears_nothing(channel)
    channel.close()
    server.close()
    assert os.listdir(folder.path) == [before.name]
    assert before.read_bytes() == was


def hears_nothing(channel: Channel) -> bool:
    with contextlib.closing(channel), pytest.raises((EOFError, OSError)):
        channel.receive()
    return True


# -- a fleet that shares no disk -----------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Trainers do not find the folder's token, and what they ask the driver for."""
    asked: list[type] = []
    answer = TransferServer._answer

    def noted(server: TransferServer, channel: Channel, request: Any) -> None:
        asked.append(type(request))
        answer(server, channel, request)

    monkeypatch.setattr(TransferServer, "_answer", noted)
    monkeypatch.setattr(sweep, "mark", lambda root: mark(root)[::-1])
    return asked


def dies_once(trial: Any, flag: Path) -> float:
    own_epochs = trial.epochs

    def epochs(number: int) -> Iterator[int]:
        for epoch in own_epochs(number):
            if epoch == 3 and trial.number == 1 and not flag.exists():
                trial._training.saver.finish()  # or it would not be known what is lost
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield epoch

    trial.epochs = epochs
    train(trial, epochs=5)
    return trial.best_value  # type: ignore[no-any-return]


def check_same(study: optuna.Study, undisturbed: optuna.Study) -> None:
    """Equal but for rounding: trials may be on several devices."""
    for ours, theirs in zip(study.trials, undisturbed.trials, strict=True):
        assert ours.value == pytest.approx(theirs.value, rel=1e-10)
        assert ours.intermediate_values == theirs.intermediate_values
        assert ours.user_attrs["noise"] == theirs.user_attrs["noise"]
        losses = theirs.user_attrs["losses"]
        assert ours.user_attrs["losses"] == pytest.approx(losses, rel=1e-10)


def test_a_sweep_on_nodes_that_share_no_disk_is_the_same(
    requests: list[type], tmp_path: Path, fleet: Any
) -> None:
    survives = functools.partial(dies_once, flag=tmp_path)
    dies = functools.partial(dies_once, flag=tmp_path / "died")
    moves = {n: [Leg((n,), 2), Leg((n + 1,), 4), Leg((n,))] for n in (0, 1)}
    undisturbed, root = optuna.create_study(), tmp_path / "checkpoints"
    undisturbed.optimize(survives, n_trials=2, executor=fleet)
    with fleet_of(devices=3, checkpoints=Checkpoints(root, interval_s=0.0, keep=2)) as executor:
        for script, objective in ((moves, survives), (None, dies)):
            study = optuna.create_study()
            executor.script = script
            study.optimize(objective, n_trials=2, executor=executor)
            check_same(study, undisturbed)
            for number in (0, 1):
                load_best_model(study, small_model(), trial=number)
            left = os.listdir(StudyFolder(root, study.study_name).path)
            assert set(left) == {"call.json", "trial-0.final.pt", "trial-1.final.pt"}
    assert (tmp_path / "died").exists()
    assert set(requests) == {Put, Get}


def test_a_disk_that_is_full_costs_the_checkpoints_alone(
    requests: list[type],
    tmp_path: Path,
    fleet: Any,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def full(path: Path) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr(transfer, "Store", lambda root: SimpleNamespace(write=full))
    undisturbed, study = optuna.create_study(), optuna.create_study()
    undisturbed.optimize(train, n_trials=1, executor=fleet)
    with fleet_of(devices=1, checkpoints=Checkpoints(tmp_path, interval_s=0.0)) as executor:
        study.optimize(train, n_trials=1, executor=executor)
    check_same(study, undisturbed)
    assert set(requests) == {Put}
    assert log.getvalue().count("goes on without a new checkpoint") == 1
    assert "No space left on device): check that its folder exists" in log.getvalue()


def test_ranks_that_share_no_disk_resume_together(
    requests: list[type], tmp_path: Path, fleet: Any
) -> None:
    undisturbed, study = optuna.create_study(), optuna.create_study()
    undisturbed.optimize(train, n_trials=1, executor=fleet)
    with fleet_of(devices=2) as executor:  # in a private folder
        executor.script = {0: [Leg((0,), 2), Leg((0, 1), 4), Leg((1,))]}
        study.optimize(train, n_trials=1, executor=executor)
    assert requests.count(Get) == 1  # who has it in memory reads nothing; one reads for all
    check_same(study, undisturbed)
