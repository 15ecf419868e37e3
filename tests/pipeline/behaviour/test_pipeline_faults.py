"""What goes wrong with data, disks and processes, and what a trial gets to see of it."""

import os
import random
import signal
import subprocess
import sys
from asyncio import CancelledError
from functools import partial

import numpy as np
import pytest
from PIL import Image
from pipeline_datasets import Counted, each_was_made
from pipeline_harness import MAX_DEATHS, Forked, labels, permutation, serving
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import FleetConfigError, PreprocessingError


class Broken(Counted):
    """Raises for some indices."""

    def __init__(self, n, bad):
        super().__init__(n)
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"number {index} is broken")
        return super().__getitem__(index)


# -- samples that raise ---------------------------------------------------------------------------


def test_skipped_samples_are_replaced_by_the_next_and_counted():
    pipeline = SharedPipeline(train=Broken(50, {7, 8, 49}), on_error="skip")
    with serving(pipeline) as agent:
        for batch_size in (3, 16):
            order = permutation(0, "train", 0, 50).tolist()
            wanted = [{7: 9, 8: 9, 49: 0}.get(index, index) for index in order]
            assert labels(agent.client(), batch_size=batch_size) == wanted
        assert agent.stats().num_skipped == 4  # 7 and 8 for the place of 7, 8 for that of 8, 49
        (notice,) = agent.notices()
    assert notice.startswith("Skipped sample(s) ")
    assert "is broken" in notice
    assert "Traceback" in notice


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Mute(), r"raised Mute: \(its text"),
        (SystemExit(3), "SystemExit: 3"),
        (CancelledError("too late"), "CancelledError: too late"),
    ],
)
def test_odd_exceptions_of_samples_end_no_process(error, message):
    pipeline = SharedPipeline(val=Angry(error))
    with serving(pipeline) as agent:
        with pytest.raises(PreprocessingError, match=message):
            labels(agent.client(), "val")
        assert agent.stats().num_lost == 0


class Angry:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise self.error


@pytest.fixture
def folder(tmp_path):
    """Two classes of small photographs, one of which is cut short."""
    generator = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path.parent.parent


def test_corrupt_image(folder):
    images = ImageFolder(folder, v2.Compose([v2.ToImage(), v2.RandomCrop(16)]))
    error = pytest.raises(PreprocessingError, match=r"Sample \d+ of .*[Tt]runcated")
    with serving(SharedPipeline(train=images)) as agent, error:
        labels(agent.client())
    with serving(SharedPipeline(train=images, on_error="skip")) as agent:
        assert len(labels(agent.client())) == 12
        assert agent.stats().num_skipped == 1


# -- data sets that do not survive a fork ---------------------------------------------------------


class Eager:
    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.file.read(1)


def test_open_file_is_refused_with_advice(tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    dataset = Eager(tmp_path / "data")
    named = r"`val\.file`, given to SharedPipeline, is of type .*when it is first used"
    with dataset.file, pytest.raises(FleetConfigError, match=named):
        SharedPipeline(val=dataset).payload()


# -- processes that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_preprocessors_killed_at_random(seed):
    chance = random.Random(seed)
    pipeline = SharedPipeline(train=Counted(150), seed=3)
    wanted = [permutation(3, "train", e, 150).tolist() for e in range(3)]

    def read(client, batch_size):
        return [labels(client, epoch=e, batch_size=batch_size) for e in range(3)]

    with serving(pipeline, chunk_bytes=300, num_preprocessors=3, memory_bytes=20_000) as agent:
        readers = [Forked(partial(read, agent.client(), size)) for size in (1, 32)]
        client = agent.client()
        for epoch in range(3):
            ours = []
            # Fewer than the deaths over one chunk that make it an error.
            moments = chance.sample(range(30), MAX_DEATHS - 1)
            for step, batch in enumerate(client.read("train", epoch=epoch, batch_size=5)):
                ours += batch.data[1].tolist()
                if step in moments and (pids := agent.pids()):
                    os.kill(pid := chance.choice(pids), signal.SIGKILL)
                    while pid in agent.pids():
                        pass  # each question is answered after what the agent has heard so far
            assert ours == wanted[epoch]
        assert [reader.result() for reader in readers] == [wanted] * 2
        assert agent.stats().num_lost > 0


# -- memory and disks -----------------------------------------------------------------------------


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(FleetConfigError, match=r"memory_bytes=\d+, but only \d+ bytes of memory"):
        SharedPipeline(val=Counted(3), memory_bytes=1 << 50).packed().setup(1)


@pytest.mark.parametrize("where", ["nowhere", "file"])
def test_spill_folder_that_can_not_be_used(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(FleetConfigError, match=rf"spill_dir='.*{where}'.*existing folder"):
        SharedPipeline(val=Counted(3), spill_dir=tmp_path / where).packed().setup(1)


def test_more_than_the_disk_has_is_refused(tmp_path):
    pipeline = SharedPipeline(val=Counted(3), spill_dir=tmp_path, memory_bytes=1 << 60)
    with pytest.raises(FleetConfigError, match=r"only \d+ bytes are free in spill_dir='"):
        pipeline.packed().setup(1)


def test_what_memory_has_no_room_for_lies_in_a_folder(tmp_path):
    pipeline = SharedPipeline(train=Counted(150), spill_dir=tmp_path)
    with serving(pipeline, memory_bytes=1 << 20, chunk_bytes=1000) as agent:
        for _ in range(2):
            for epoch in range(3):
                client = agent.client()
                assert labels(client, epoch=epoch) == permutation(0, "train", epoch, 150).tolist()
        stats = agent.stats()
        assert os.listdir(tmp_path) == []
    assert stats.preprocessed == 450
    assert each_was_made(150, 3)
    assert 6000 < stats.resident_bytes <= stats.peak_bytes <= 1 << 20


def test_without_a_spill_folder_the_cost_is_told_once():
    with serving(SharedPipeline(train=Counted(150)), memory_bytes=6000, chunk_bytes=1000) as agent:
        for epoch in (0, 1, 0, 1, 0):
            labels(agent.client(), epoch=epoch)
        (notice,) = agent.notices()
        assert agent.stats().repeated > 0
    assert "do not fit into" in notice
    assert "spill_dir" in notice


_IN_NAMESPACE = """
import contextlib, os, sys
sys.path[:0] = {path!r}
from pipeline_datasets import Counted
from pipeline_harness import labels, permutation, serving
from optuna_fleet import FleetConfigError, SharedPipeline

with serving(SharedPipeline(train=Counted(150)), chunk_bytes=1000) as agent:
    assert labels(agent.client()) == permutation(0, "train", 0, 150).tolist()

def fill():
    with open({disk!r} + "/others", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass

pipeline = SharedPipeline(train=Counted(150), spill_dir={disk!r}, memory_bytes=1 << 16)
with serving(pipeline, memory_bytes=1 << 16, chunk_bytes=1000) as agent:
    labels(agent.client())
    with contextlib.suppress(OSError):
        fill()
    for epoch in (0, 1, 2, 0):
        assert labels(agent.client(), epoch=epoch) == permutation(0, "train", epoch, 150).tolist()
try:
    with contextlib.suppress(OSError):
        fill()
    pipeline.packed()
except FleetConfigError as error:
    assert "only 0 bytes are free" in str(error), error
else:
    raise AssertionError
"""


def test_full_shared_memory_does_not_matter_nor_a_disk_that_others_fill_meanwhile(tmp_path):
    (tmp_path / "disk").mkdir()
    mounts = (
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && "
        f"mount -t tmpfs -o size=128k none {tmp_path / 'disk'}"
    )
    code = _IN_NAMESPACE.format(path=sys.path, disk=str(tmp_path / "disk"))
    (tmp_path / "script.py").write_text(code)
    command = f"{mounts} && exec {sys.executable} {tmp_path / 'script.py'}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    done = subprocess.run([*unshare, command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
