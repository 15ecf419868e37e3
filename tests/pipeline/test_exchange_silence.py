"""The agent's side of the exchange, with an exchanger that says what the test says, or nothing."""

import logging
import os
import selectors

import pytest
from exchange_harness import config
from pipeline_datasets import Counted

from optuna_fleet.pipeline import SharedPipeline, wire
from optuna_fleet.pipeline.exchange import Exchange, Inlets, exchange
from optuna_fleet.pipeline.exchange.alarm import Alarm
from optuna_fleet.pipeline.exchange.messages import (
    AskSize,
    ChunkFetched,
    ChunkNotFetched,
    ExchangeReady,
    FetchChunk,
    SizeTold,
)
from optuna_fleet.pipeline.server.instructions import Produce
from optuna_fleet.pipeline.spec import ChunkKey

KEY = ChunkKey("val", 0, 0)
ORDER = Produce(key=KEY, max_bytes=1000)


class Node:
    """Node 1 of 2; chunk 0 is the other's."""

    def __init__(self, **options):
        self.selector = selectors.DefaultSelector()
        self.told = []
        self.exchange = Exchange(
            config(1, 2, 4711, **options),
            spec=SharedPipeline(val=Counted(64)).spec(),
            inlets=Inlets(
                fetched=lambda *what: self.told.append(("fetched", *what)),
                outgrew=lambda *what: self.told.append(("outgrew", *what)),
                unfetched=lambda *what: self.told.append(("unfetched", *what)),
                sized=lambda *what: self.told.append(("sized", *what)),
                changed=lambda: None,
            ),
            room_bytes=10_000,
        )
        self.exchange.start(
            spawn=self.spawn, selector=self.selector, close_in_child=lambda: None
        ).close()

    def spawn(self, main):
        ours, self.exchanger = wire.socket_pair()
        return 0, ours

    def says(self, message, fd=None):
        wire.send(self.exchanger, message, fd)
        self.turn()

    def turn(self):
        """Waits until something happens, and handles it."""
        for key, mask in self.selector.select():
            key.data(mask)

    def fetch(self):
        self.exchange.fetch(ORDER, node=0, chunk_size=8, spill_dir=None)

    def is_alone(self):
        return self.exchange.source(KEY) is None and not self.exchange.has_room()

    def close(self):
        self.exchange.close()
        self.exchanger.close()
        self.selector.close()


@pytest.fixture
def node(request, monkeypatch):
    for name in ("_START_S", "_GRACE_S"):
        monkeypatch.setattr(exchange, name, 0.0)
    node = Node(**{"join_timeout_s": 60, "fetch_timeout_s": 0.01, **getattr(request, "param", {})})
    yield node
    node.close()


def test_what_kept_nodes_away_is_one_warning_that_says_what_to_do(node, caplog):
    problem = "node 0 did not come (no answer within 60 s)"
    node.says(ExchangeReady(up=(), problem=problem))
    assert node.is_alone()
    assert node.exchange.status == f"self: {problem}"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"Node 1 preprocesses all for itself: {problem}. Look ")
    assert "127.0.0.1" in record.getMessage()
    assert "port 4711" in record.getMessage()


@pytest.mark.parametrize("node", [{"join_timeout_s": 0.01}], indirect=True)
def test_readers_do_not_wait_for_an_exchanger_that_never_gets_ready(node, caplog):
    assert node.exchange.ask_size("val")  # nobody says it before the nodes have met
    node.turn()
    assert node.told == [("sized", "val", None)]
    assert not node.exchange.ask_size("val")
    (record,) = caplog.records
    assert "does not answer" in record.getMessage()
    node.says(ExchangeReady(up=(0,)))
    assert node.exchange.source(KEY) == 0
    assert node.exchange.status == "all-shared: as it was given"


def test_chunk_that_comes_too_late_is_not_taken_and_the_node_is_asked_again(node):
    node.says(ExchangeReady(up=(0,)))
    node.fetch()
    node.turn()
    assert node.told == [("unfetched", ORDER)]
    assert node.is_alone()
    before = os.listdir("/proc/self/fd")
    with open(os.devnull) as file:
        node.says(ChunkFetched(key=KEY), file.fileno())
    assert os.listdir("/proc/self/fd") == before
    assert node.told == [("unfetched", ORDER)]
    assert node.exchange.source(KEY) == 0
    node.fetch()
    node.says(ChunkNotFetched(key=KEY, reason="for the test"))
    assert node.told == [("unfetched", ORDER)] * 2


def test_size_that_comes_too_late_is_not_taken(node):
    node.says(ExchangeReady(up=(0,)))
    assert node.exchange.ask_size("val")
    node.turn()
    assert not node.exchange.ask_size("val")
    node.says(SizeTold(name="val", chunk_size=16))
    assert node.told == [("sized", "val", None)]


def test_all_that_is_owed_must_come_before_more_is_asked(node):
    node.says(ExchangeReady(up=(0,)))
    node.fetch()
    node.exchange.ask_size("val")
    node.turn()
    node.says(SizeTold(name="val", chunk_size=16))
    assert node.is_alone()
    node.says(ChunkNotFetched(key=KEY, reason="for the test"))
    assert not node.is_alone()
    sent = [type(wire.receive(node.exchanger)[0]) for _ in range(2)]
    assert sent == [FetchChunk, AskSize]


def test_an_answer_that_was_there_in_time_counts(node, caplog):
    """It was the agent that stood still."""
    node.says(ExchangeReady(up=(0,)))
    node.fetch()
    events = node.selector.select()  # the alarm
    wire.send(node.exchanger, ChunkNotFetched(key=KEY, reason="for the test"))
    for key, mask in events:
        key.data(mask)
    assert node.told == [("unfetched", ORDER)]
    assert not node.is_alone()
    assert not caplog.records


def test_exchanger_that_dies_after_it_was_silent(node):
    node.says(ExchangeReady(up=(0,)))
    node.fetch()
    node.turn()
    node.exchanger.close()
    node.turn()
    assert node.told == [("unfetched", ORDER)]
    assert node.exchange.status == "self: the exchanger of this node died"
    assert not node.selector.get_map()


def test_alarm_rings_once_and_not_when_it_was_set_to_before():
    with selectors.DefaultSelector() as selector:
        rung = []
        alarm = Alarm(selector, lambda: rung.append(alarm.is_set))
        alarm.set(1e-3)
        ((key, mask),) = selector.select()
        alarm.set(1000)  # anew, before what the selector saw is handled
        key.data(mask)
        assert rung == []
        alarm.set(0)
        ((key, mask),) = selector.select()
        key.data(mask)
        assert rung == [False]
        assert not selector.select(0)
        alarm.set(1e-3)
        alarm.set(None)
        events = selector.select(0.01)
        alarm.close()
        key.data(mask)
        assert (events, rung) == ([], [False])
