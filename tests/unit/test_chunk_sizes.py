"""How much memory, how many processes and how large chunks a machine has by default."""

from __future__ import annotations

import pytest

from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.pipeline_messages import MAX_TEXT, ChunkError, ChunkProduced
from optuna_fleet.pipeline.spec import ChunkKey, DatasetSpec, choose_chunk_size
from optuna_fleet.pipeline.wire import encode


def size_of(num_samples: int, sample_bytes: int, chunk_bytes: int = 4 << 20) -> int:
    spec = DatasetSpec(name="train", num_samples=num_samples, length=num_samples, shuffled=True)
    return choose_chunk_size(spec, sample_bytes=sample_bytes, chunk_bytes=chunk_bytes)


def test_chunk_sizes() -> None:
    sizes = {(10**6, 150_000): 16, (10**6, 10**8): 1, (3, 4): 3, (1600, 4): 64, (10**6, 4): 256}
    assert {given: size_of(*given) for given in sizes} == sizes


def test_news_of_the_largest_chunk_fits_into_a_packet() -> None:
    size = size_of(10**9, 1, chunk_bytes=20 << 20)
    complaint = ChunkError(summary="x" * MAX_TEXT, traceback="y" * MAX_TEXT)
    assert encode(
        ChunkProduced(
            key=ChunkKey("train", 10**6, 10**6),
            nbytes=1 << 60,
            num_samples=size,
            skipped=tuple(range(2**31 - size, 2**31)),
            complaint=complaint,
        )
    )


def test_defaults_fit_the_machine() -> None:
    assert [limits.default_preprocessors(c, cpu_slots=True) for c in (1, 8)] == [1, 2]
    assert [limits.default_preprocessors(c, cpu_slots=False) for c in (1, 8, 64)] == [1, 4, 16]
    assert 1 << 20 < limits.budget(None, None) < 1 << 45
    assert limits.default_chunk_bytes(10 << 30) == limits.default_chunk_bytes(None) == 20 << 20
    assert limits.default_chunk_bytes(1 << 20) == 64 << 10
    assert limits.default_chunk_bytes(1 << 10) == 4096


@pytest.mark.parametrize(
    ("cpus", "num_slots", "cpu_slots", "most"),
    [(2, 2, True, 1), (8, 4, True, 4), (1, 1, True, 1), (2, 4, False, 1), (64, 8, False, 56)],
)
def test_limits_of_machines(cpus: int, num_slots: int, cpu_slots: bool, most: int) -> None:
    assert limits.most_preprocessors(cpus, num_slots=num_slots, cpu_slots=cpu_slots) == most
