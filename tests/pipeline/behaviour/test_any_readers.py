"""Readers of any batch size and speed that come, leave and die in any order: none is harmed.

Nor are they by preprocessors that are killed.
"""

import os
import signal
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_datasets import COUNTS, Counted
from pipeline_harness import (
    MAX_DEATHS,
    Agent,
    PipelineClient,
    permutation,
    serving,
    shard,
    vanish,
)

from optuna_fleet import SharedPipeline


@dataclass
class Reader:
    """One trial's rank: how it reads, and what it has got so far."""

    client: PipelineClient
    batch_size: int
    rank: int
    world_size: int
    epoch: int
    got: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.batches = self._open()

    def _open(self):
        return iter(
            self.client.read(
                "train",
                epoch=self.epoch,
                batch_size=self.batch_size,
                rank=self.rank,
                world_size=self.world_size,
                continues=self.epoch % 2 == 0,
            )
        )

    def step(self, n):
        """Reads a batch, or ends the epoch, goes on to the next one and says so."""
        batch = next(self.batches, None)
        if batch is not None:
            self.got += [] if batch.data is None else batch.data[1].tolist()
            return False
        assert self.got == self.wanted(n)
        self.epoch, self.got = self.epoch + 1, []
        self.batches = self._open()
        return True

    def wanted(self, n):
        order = permutation(3, "train", self.epoch, n).tolist()
        wanted = []
        for begin in range(0, n, self.batch_size):
            size = min(self.batch_size, n - begin)
            start, stop = shard(size, self.rank, self.world_size)
            wanted += order[begin + start : begin + stop]
        return wanted


def join(agent: Agent, data) -> Reader:
    world_size = data.draw(st.integers(1, 3))
    return Reader(
        client=agent.client(),
        batch_size=data.draw(st.sampled_from([1, 3, 7, 32, 128])),
        rank=data.draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        epoch=data.draw(st.integers(0, 2)),
    )


def kill_one(agent: Agent) -> int:
    """Kills a preprocessor, if there is one; returns how many it were."""
    for pid in agent.pids()[:1]:
        os.kill(pid, signal.SIGKILL)
        while pid in agent.pids():
            pass  # each question is answered after what the agent has heard so far
        return 1
    return 0


@given(
    data=st.data(),
    n=st.integers(1, 200),
    memory_bytes=st.sampled_from([5_000, 50_000, 1 << 20]),
    num_preprocessors=st.integers(1, 3),
    spilled=st.booleans(),
)
@settings(max_examples=20, database=None)
def test_every_reader_gets_its_epoch_whatever_the_others_do(
    data, n, memory_bytes, num_preprocessors, spilled, tmp_path_factory
):
    COUNTS[:] = 0
    folder = str(tmp_path_factory.mktemp("spill")) if spilled else None
    pipeline = SharedPipeline(train=Counted(n), seed=3)
    options = {"num_preprocessors": num_preprocessors, "chunk_bytes": 500}
    with serving(pipeline, memory_bytes=memory_bytes, spill_dir=folder, **options) as agent:
        readers: list[Reader] = [join(agent, data)]
        num_killed = 0  # fewer than the deaths over one chunk that make it an error
        for _ in range(data.draw(st.integers(1, 60))):
            what = data.draw(st.sampled_from(["step"] * 6 + ["join", "leave", "die", "kill"]))
            if what == "join" and len(readers) < 6:
                readers.append(join(agent, data))
            elif what == "kill":
                num_killed += kill_one(agent) if num_killed + 1 < MAX_DEATHS else 0
            elif readers:
                reader = data.draw(st.sampled_from(readers))
                match what:
                    case "leave":
                        readers.remove(reader)
                        reader.batches.close()
                    case "die":
                        readers.remove(reader)
                        vanish(reader.client)
                    case _:
                        reader.step(n)
        for reader in readers:  # those left finish their epoch
            while not reader.step(n):
                pass
            reader.batches.close()
        stats = agent.stats()
        assert stats.lent_bytes == 0
        assert stats.peak_bytes <= memory_bytes
        assert stats.num_lost == num_killed
        if memory_bytes > 1 << 19:
            assert stats.repeated == 0
