"""A SharedPipeline by itself: readers in processes and threads that no executor started."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from pipeline_harness import Forked
from standalone_harness import new_pipeline, read
from torch.utils.data import Dataset

from optuna_fleet.exceptions import FleetError, PreprocessingError, ProtocolError
from optuna_fleet.pipeline import SharedPipeline, limits, standalone
from tests.nursery import FIRST, Nursery


@pytest.fixture(scope="module", autouse=True)
def _nursery_is_there(nursery: Nursery) -> None:
    """Or its descriptor would be among what a test has left."""
    nursery.begin()


class Sticky(Dataset[int]):
    """Stops each process that asks for sample 17."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 17:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


# -- faults -----------------------------------------------------------------------------------


def test_a_server_that_ends_as_it_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_SERVER", "optuna_fleet.no_such_module")
    with new_pipeline() as pipeline, pytest.raises(FleetError, match="ended"):
        read(pipeline)


def test_a_preprocessor_that_is_stuck_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STUCK_S", 1.0)
    # As some supervisors leave it to all that they start.
    (tmp_path / "first.py").write_text(
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    )
    monkeypatch.setenv(FIRST, str(tmp_path / "first.py"))
    with SharedPipeline(val=Sticky(), test=range(40), num_preprocessors=1) as pipeline:
        with pytest.raises(PreprocessingError, match=r"data set .val.: .*stuck"):
            read(pipeline, "val")
        assert pipeline.stats().num_lost >= 3
        (batch,) = read(pipeline, "test", batch_size=40)
        assert batch.tolist() == list(range(40))


def test_another_users_server_is_not_read(
    running: SharedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ProtocolError, match="another user"):
        running.handle().connect()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_other_users_are_given_nothing(running: SharedPipeline) -> None:
    address = running.handle().address

    def read_as_nobody() -> bytes:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(address)
            return sock.recv(1 << 16)

    assert Forked(read_as_nobody).result() == b""
