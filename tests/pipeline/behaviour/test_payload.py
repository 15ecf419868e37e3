"""The data sets on their way to the preprocessors."""

import os
import time
from pathlib import Path

import pytest
import torch
from pipeline_datasets import LENGTH, mapped
from pipeline_harness import MIN_CHUNK_SAMPLES, serving

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import PreprocessingError

MB = 1 << 20


def nbytes(payload):
    return os.stat(payload.path).st_size


class Tokens:
    """Sample i is the i-th row of a mapped file."""

    def __init__(self, path):
        self.rows = mapped(path).reshape(-1, 100)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.from_numpy(self.rows[index].copy())


class Both:
    """Two preprocessors make samples of it, however late one of them begins."""

    def __init__(self, folder):
        self.folder = folder

    def meet(self, index):
        """But for the first chunk, whose samples tell their size: one makes it alone."""
        (self.folder / str(os.getpid())).touch()
        while index >= MIN_CHUNK_SAMPLES and len(os.listdir(self.folder)) < 2:
            time.sleep(2e-3)


class Summed(Both):
    """Each sample takes all of the data, so that whoever makes one has all of its pages."""

    def __init__(self, folder, nbytes):
        super().__init__(folder)
        self.numbers = torch.ones(nbytes // 8, dtype=torch.int64)

    def __len__(self):
        return 4 * MIN_CHUNK_SAMPLES

    def __getitem__(self, index):
        self.meet(index)
        return self.numbers.sum()


def read(agent):
    return [batch.data for batch in agent.client().read("val", epoch=0, batch_size=100)]


def test_a_mapped_data_set_is_served(tokens, monkeypatch):
    monkeypatch.chdir(tokens.parent)
    dataset = Tokens(tokens.name)
    monkeypatch.chdir("/")
    pipeline = SharedPipeline(val=dataset)
    assert nbytes(pipeline.payload()) < 5000
    with serving(pipeline) as agent:
        found = torch.cat(read(agent))
    assert torch.equal(found.flatten(), torch.arange(LENGTH, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "No such file.*tokens.bin"),
        (lambda path: os.truncate(path, 100), "tokens.bin.* has 100 bytes, but had 400064 when"),
    ],
)
def test_a_mapped_file_that_changes_on_the_way_is_named(tokens, change, message):
    with serving(SharedPipeline(val=Tokens(tokens))) as agent:
        change(tokens)
        with pytest.raises(PreprocessingError, match=message):
            read(agent)


# Memory


def memory_of(pid):
    """Bytes of a process' memory by kind."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def test_preprocessors_share_the_memory_of_a_data_set(tmp_path):
    with serving(SharedPipeline(val=Summed(tmp_path, 64 * MB)), chunk_bytes=100) as agent:
        assert read(agent)[0].tolist() == [8 * MB] * 4 * MIN_CHUNK_SAMPLES
        memories = [memory_of(pid) for pid in agent.pids()]
    assert len(memories) == 2
    for memory in memories:
        assert memory["Private_Dirty"] < 40 * MB
        assert memory["Shared_Dirty"] + memory["Shared_Clean"] > 64 * MB
