"""Preprocessors that are stuck, those that only seem to be, and what is asked of one first."""

import os
import selectors

import pytest
import torch
from pipeline_datasets import COUNTS, SWITCH, Counted
from pipeline_harness import serving

from optuna_fleet.pipeline import SharedPipeline, wire
from optuna_fleet.pipeline.pipeline_messages import AtWork, MeasureSample
from optuna_fleet.pipeline.server.workers import MAKER, Workers


def test_who_is_done_is_not_killed_because_nobody_has_looked_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = wire.socket_pair()
    heard: list[object] = []
    killed: list[int] = []
    now = [0.0]
    monkeypatch.setattr(os, "kill", lambda pid, signal: killed.append(pid))
    with selectors.DefaultSelector() as selector, theirs:
        pool = Workers(
            limit=lambda kind: 1,
            spawn=lambda main: (1, ours),
            main=lambda sock: None,
            selector=selector,
            on_message=heard.append,
            on_lost=lambda work: None,
            on_idle=lambda: None,
            clock=lambda: now[0],
        )
        work = MeasureSample(name="train")
        pool.give(MAKER, work)
        wire.send(theirs, "done")
        now[0] += 100
        pool.kill_stuck(10)
        assert (heard, killed) == (["done"], [])
        pool.give(MAKER, work)
        for _ in range(3):  # samples are slow, but one after another is made
            now[0] += 9
            wire.send(theirs, AtWork())
            pool.kill_stuck(10)
            now[0] += 2
            pool.kill_stuck(10)
        assert (heard, killed, pool.num_busy(MAKER)) == (["done"], [], 1)
        now[0] += 100
        pool.kill_stuck(10)
        assert killed == [1]
        pool.close()


class Faltering(Counted):
    """The third sample is larger than the others, and can't be had the first time."""

    def __getitem__(self, index):
        if index == 2 and not COUNTS[SWITCH]:
            COUNTS[SWITCH] += 1
            raise OSError("no answer")
        return torch.zeros(100_000 if index == 2 else 1)


def test_a_size_is_measured_again_where_that_failed():
    """Nodes that cut differently would share nothing."""
    pipeline = SharedPipeline(val=Faltering(100_000), collate_fn=list)
    with serving(pipeline, num_preprocessors=1) as agent:
        assert agent.client().open_pass("val", 0, 0).chunk_size == 8
