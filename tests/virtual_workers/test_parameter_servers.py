"""What parameter servers answer, and what they do not take."""

import pytest
import torch

from optuna_fleet.virtual_workers.parameter_server import ParameterServer, ServerClient
from optuna_fleet.virtual_workers.stage_messages import (
    Pull,
    Push,
    ServerAddress,
    Snapshot,
    StageAddress,
)


class Recorder:
    """A transport that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, sender, to, message):
        self.sent.append((to, message))

    def snapshots(self):
        """(virtual worker, clock, value) of all answers, and forgets them."""
        sent, self.sent = self.sent, []
        return [(to.worker, s.clock, s.weights["w"].item()) for to, s in sent]


def server(num_workers=2, distance=1):
    transport = Recorder()
    weights = {"w": torch.tensor(100.0)}
    made = ParameterServer(
        address=ServerAddress(0),
        weights=weights,
        num_workers=num_workers,
        clock_distance=distance,
        transport=transport,
    )
    return made, transport


def push(worker, wave, value):
    return Push(worker=worker, wave=wave, updates={"w": torch.tensor(float(value))})


def pull(worker, clock, *, exactly=False):
    return Pull(asker=StageAddress(worker, 0), clock=clock, exactly=exactly)


def test_a_wave_counts_once_everybody_has_pushed_it():
    made, transport = server()
    made.receive(push(0, 0, 1))
    made.receive(pull(0, 1))
    assert transport.snapshots() == []  # parked
    assert made.weights["w"] == 100
    made.receive(push(1, 0, 10))
    assert transport.snapshots() == [(0, 1, 111.0)]


def test_a_pull_gets_the_newest_weights_or_exactly_those_it_asked_for():
    made, transport = server()
    for wave in range(3):
        for worker in range(2):
            made.receive(push(worker, wave, 1))
    made.receive(pull(0, 1))
    made.receive(pull(1, 2, exactly=True))
    assert transport.snapshots() == [(0, 3, 106.0), (1, 2, 104.0)]


def test_weights_are_kept_while_somebody_may_ask_for_them():
    made, transport = server()
    for wave in range(4):
        for worker in range(2):
            made.receive(push(worker, wave, 1))
        made.receive(pull(0, wave + 1))
    assert len(made._snapshots) == 5  # the other one has asked for nothing yet
    made.receive(pull(1, 3, exactly=True))
    assert len(made._snapshots) == 2
    assert transport.snapshots()[-1] == (1, 3, 106.0)


def test_a_wave_is_pushed_once_and_in_order():
    made, _ = server()
    made.receive(push(0, 0, 1))
    with pytest.raises(AssertionError, match="pushed wave 0, but 1 is next"):
        made.receive(push(0, 0, 1))


def test_nobody_pushes_further_ahead_than_the_clock_distance_lets_them():
    made, _ = server(distance=1)
    made.receive(push(0, 0, 1))
    made.receive(push(0, 1, 1))
    with pytest.raises(AssertionError, match="clock distance of 1"):
        made.receive(push(0, 2, 1))


def test_the_pieces_of_a_stage_come_from_one_clock():
    transport = Recorder()
    client = ServerClient(StageAddress(0, 1), {3: ["a"], 4: ["b"], 7: []}, transport)
    client.pull(2, exactly=False)
    client.pull(2, exactly=False)  # was asked for
    assert transport.sent == [(ServerAddress(3), pull_of(2, exactly=False))]

    def answer(piece, **weights):
        return client.receive(Snapshot(piece=piece, clock=5, weights=weights))

    assert answer(3, a=1) is None
    assert transport.sent[1:] == [
        (ServerAddress(4), pull_of(5, exactly=True)),
        (ServerAddress(7), pull_of(5, exactly=True)),
    ]
    assert answer(7) is None
    assert answer(4, b=2) == {"a": 1, "b": 2}


def pull_of(clock, *, exactly):
    return Pull(asker=StageAddress(0, 1), clock=clock, exactly=exactly)
