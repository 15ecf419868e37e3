import subprocess
import sys
from pathlib import Path

import pytest

import optuna_fleet
from optuna_fleet.pipeline.limits import (
    budget,
    default_chunk_bytes,
    default_preprocessors,
    most_preprocessors,
)
from optuna_fleet.pipeline.pipeline_messages import MAX_TEXT, ChunkError, ChunkProduced
from optuna_fleet.pipeline.spec import ChunkKey, DatasetSpec, choose_chunk_size
from optuna_fleet.pipeline.stats import PipelineUse
from optuna_fleet.pipeline.wire import encode


def test_importing_the_pipeline_imports_no_torch():
    code = "import sys, optuna_fleet.pipeline.preprocessor.order; sys.exit('torch' in sys.modules)"
    # The package itself may import what it likes elsewhere; only this room is looked at.
    stub = "import types; m = types.ModuleType('optuna_fleet'); "
    stub += "m.__path__ = ['optuna_fleet']; import sys; sys.modules['optuna_fleet'] = m; "
    root = Path(optuna_fleet.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", stub + code], cwd=root).returncode == 0


def size_of(num_samples: int, sample_bytes: int, chunk_bytes: int = 4 << 20) -> int:
    spec = DatasetSpec(name="train", num_samples=num_samples, length=num_samples, shuffled=True)
    return choose_chunk_size(spec, sample_bytes=sample_bytes, chunk_bytes=chunk_bytes)


def test_chunk_sizes():
    assert size_of(10**6, 150_000) == 16
    assert size_of(10**6, 10**8) == 1
    assert size_of(3, 4) == 3
    assert size_of(1600, 4) == 64
    assert size_of(10**6, 4) == 256


def test_news_of_the_largest_chunk_fits_into_a_packet():
    size = size_of(10**9, 1, chunk_bytes=20 << 20)
    indices = range(2**31 - size, 2**31)
    done = ChunkProduced(
        key=ChunkKey("train", 10**6, 10**6),
        nbytes=1 << 60,
        num_samples=size,
        busy_s=1 / 3,
        skipped=tuple(indices),
        complaint=ChunkError(summary="x" * MAX_TEXT, traceback="y" * MAX_TEXT),
    )
    assert encode(done)


def test_defaults_fit_the_machine():
    assert [default_preprocessors(c, cpu_slots=True) for c in (1, 8)] == [1, 2]
    assert [default_preprocessors(c, cpu_slots=False) for c in (1, 8, 64)] == [1, 4, 16]
    assert 1 << 20 < budget(None, None) < 1 << 45
    assert default_chunk_bytes(10 << 30) == default_chunk_bytes(None) == 20 << 20
    assert default_chunk_bytes(1 << 20) == 64 << 10
    assert default_chunk_bytes(1 << 10) == 4096


@pytest.mark.parametrize(
    ("cpus", "num_slots", "cpu_slots", "most"),
    [(2, 2, True, 1), (8, 4, True, 4), (1, 1, True, 1), (2, 4, False, 1), (64, 8, False, 56)],
)
def test_limits_of_machines(cpus, num_slots, cpu_slots, most):
    assert most_preprocessors(cpus, num_slots=num_slots, cpu_slots=cpu_slots) == most


def test_use_is_a_difference_of_sums():
    early = PipelineUse(active_s=1.0, running_s=1.0, reading_s=2.0, stalled_s=2.0)
    late = early.plus(PipelineUse(10.0, 20.0, 5.0, 10.0, 10.0, 1.0))
    use = late.since(early)
    assert use.num_preprocessors == 2.0
    assert (use.busy_share, use.blocked_share, use.stalled_share) == (0.25, 0.5, 0.1)
    assert PipelineUse().busy_share == 0.0
