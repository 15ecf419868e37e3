from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pipeline_datasets import COUNTS, LENGTH, Counted
from pipeline_harness import Agent, serving
from standalone_harness import new_pipeline

from optuna_fleet.pipeline import SharedPipeline


@pytest.fixture(autouse=True)
def counts_reset() -> None:
    COUNTS[:] = 0


@pytest.fixture(autouse=True)
def no_interface_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups of other tests were on the loopback interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """One agent for all tests of a module that only read."""
    pipeline = SharedPipeline(train=Counted(150), val=Counted(20), seed=3)
    with serving(pipeline, chunk_bytes=1000) as agent:
        yield agent


@pytest.fixture(scope="module")
def running() -> Iterator[SharedPipeline]:
    with new_pipeline() as pipeline:
        yield pipeline


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file of so many numbers, 64 bytes behind its beginning."""
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(64) + np.arange(LENGTH, dtype=np.int32).tobytes())
    return path
