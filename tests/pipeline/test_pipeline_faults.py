"""What goes wrong with data, disks and processes, and what a trial gets to see of it."""

import os
import selectors
import subprocess
import sys

import pytest

from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.messages import MeasureSample
from optuna_fleet.pipeline.server.workers import PreprocessorPool
from optuna_fleet.pipeline.spec import ChunkKey

_IN_NAMESPACE = """
import os, sys
sys.path[:0] = {path!r}
from pipeline_datasets import Counted
from pipeline_harness import serving
from test_pipeline_faults import labels
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.order import permutation

with serving(SharedPipeline(train=Counted(150)), chunk_bytes=1000) as agent:
    assert labels(agent.client()) == permutation(0, "train", 0, 150).tolist()

pipeline = SharedPipeline(train=Counted(150), spill_dir={disk!r})
options = dict(memory_bytes=6000, spill_bytes=1 << 20, chunk_bytes=1000)
with serving(pipeline, **options) as agent:
    for epoch in (0, 1, 2, 0):
        assert labels(agent.client(), epoch=epoch) == permutation(0, "train", epoch, 150).tolist()
    notices = agent.notices()
    assert "No space left" in notices[0], notices
    assert "no longer spilled" in notices[0], notices
"""


def test_full_shared_memory_does_not_matter_and_a_full_disk_ends_spilling_with_a_notice(tmp_path):
    (tmp_path / "disk").mkdir()
    mounts = (
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && "
        f"mount -t tmpfs -o size=8k none {tmp_path / 'disk'}"
    )
    code = _IN_NAMESPACE.format(path=sys.path, disk=str(tmp_path / "disk"))
    (tmp_path / "script.py").write_text(code)
    command = f"{mounts} && exec {sys.executable} {tmp_path / 'script.py'}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    done = subprocess.run([*unshare, command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_who_is_done_is_not_killed_because_nobody_has_looked_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = wire.socket_pair()
    heard: list[object] = []
    killed: list[int] = []
    now = [0.0]
    monkeypatch.setattr(os, "kill", lambda pid, signal: killed.append(pid))
    with selectors.DefaultSelector() as selector, theirs:
        pool = PreprocessorPool(
            limit=1,
            spawn=lambda main: (1, ours),
            main=lambda sock: None,
            selector=selector,
            on_message=heard.append,
            on_lost=lambda key: None,
            on_idle=lambda: None,
            clock=lambda: now[0],
        )
        work = MeasureSample(key=ChunkKey("train", 0, 0))
        pool.give(work)
        wire.send(theirs, "done")
        now[0] += 100
        pool.kill_stuck(10)
        assert (heard, killed) == (["done"], [])
        pool.give(work)
        now[0] += 100
        pool.kill_stuck(10)
        assert killed == [1]
        pool.close()
