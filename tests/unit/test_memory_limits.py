"""How much memory, how many processes and how large chunks a machine has by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.pipeline_messages import MAX_TEXT, ChunkError, ChunkProduced
from optuna_fleet.pipeline.spec import ChunkKey, DatasetSpec, choose_chunk_size
from optuna_fleet.pipeline.wire import encode

GIB = 1 << 30


class Groups:
    """Control groups in a folder, as the kernel shows them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"
        self.root.mkdir()

    def v1(self, path: str, *, limit: int, used: int, files: int) -> None:
        stat = f"inactive_file 0\ntotal_inactive_file {files // 2}\ntotal_active_file {files // 2}"
        texts = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
        self._write(self.root / "memory" / path, {**texts, "memory.stat": stat})

    def v2(self, path: str, *, limit: int | str, used: int, files: int) -> None:
        stat = f"anon 1\ninactive_file {files // 2}\nactive_file {files // 2}"
        texts = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
        self._write(self.root / path, texts)

    def _write(self, folder: Path, texts: dict[str, int | str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")

    def headrooms(self, *memberships: str) -> list[int]:
        self.membership.write_text("".join(f"{line}\n" for line in memberships))
        return limits.cgroup_headrooms(self.root, self.membership)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_what_the_kernel_keeps_of_files_is_no_want_of_memory(groups: Groups) -> None:
    groups.v2("job", limit=64 * GIB, used=64 * GIB, files=62 * GIB)
    assert groups.headrooms("0::/job") == [62 * GIB]


def test_every_level_above_a_process_has_its_limit(groups: Groups) -> None:
    groups.v2("job/step/task", limit="max", used=GIB, files=0)
    groups.v2("job/step", limit=8 * GIB, used=GIB, files=0)
    groups.v2("job", limit=4 * GIB, used=6 * GIB, files=GIB)
    assert groups.headrooms("0::/job/step/task") == [7 * GIB, 0]


def test_groups_of_version_1_are_heeded(groups: Groups) -> None:
    groups.v1("slurm/job_5/step_0", limit=16 * GIB, used=10 * GIB, files=8 * GIB)
    groups.v1("slurm/job_5", limit=12 * GIB, used=10 * GIB, files=0)
    found = groups.headrooms("5:cpu,cpuacct:/other", "4:memory:/slurm/job_5/step_0", "0::/")
    assert found == [14 * GIB, 2 * GIB]


@pytest.mark.parametrize("line", ["4:memory:/docker/abc", "0::/docker/abc"])
def test_a_container_sees_its_own_limit_at_the_top(groups: Groups, line: str) -> None:
    groups.v1("", limit=2 * GIB, used=GIB, files=0)
    groups.v2("", limit=2 * GIB, used=GIB, files=0)
    assert groups.headrooms(line) == [GIB]


def test_a_machine_without_control_groups(groups: Groups) -> None:
    assert groups.headrooms() == groups.headrooms("0::/job", "4:memory:/") == []
    assert limits.cgroup_headrooms(groups.root, groups.root / "none") == []
    assert limits.available_bytes() > 0


@pytest.mark.parametrize(
    ("membership", "counters"),
    [("4:memory:/job", "memory/job/memory.oom_control"), ("0::/job", "job/memory.events.local")],
)
def test_processes_killed_for_want_of_memory_are_those_of_this_group(
    tmp_path: Path, membership: str, counters: str
) -> None:
    (tmp_path / "cgroup").write_text(f"{membership}\n")
    (tmp_path / counters).parent.mkdir(parents=True)
    (tmp_path / counters).write_text("under_oom 0\noom_kill 7\n")
    assert limits.num_out_of_memory(tmp_path, tmp_path / "cgroup") == 7
    assert limits.num_out_of_memory(tmp_path, tmp_path / "none") >= 0


# -- chunks and processes -------------------------------------------------------------------------


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
