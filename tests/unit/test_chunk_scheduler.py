"""The scheduler of chunks: any sequence of events."""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from optuna_fleet.pipeline.pipeline_messages import (
    ChunkError,
    ChunkFailed,
    ChunkReady,
    ReleaseChunks,
)
from optuna_fleet.pipeline.server.scheduler import HELD, IDLE, PAGE, Scheduler, Size, Space
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey

ERROR = ChunkError(summary="broken")
NUM_CHUNKS = 6


def size(nbytes=PAGE) -> Size:
    return Size(num_samples=NUM_CHUNKS, chunk_size=1, chunk_bytes=nbytes)


def make_scheduler(budget=3, window=0) -> Scheduler:
    """Budgets in chunks, each of which is a page."""
    scheduler = Scheduler(Space(budget * PAGE), window=window, fixed=["val"])
    scheduler.sizes |= {"train": size(), "val": size()}
    return scheduler


def told(scheduler) -> list[tuple[object, object]]:
    """What readers are to be told since the last time."""
    found = list(scheduler.outbox)
    scheduler.outbox.clear()
    return found


def there(scheduler) -> set[ChunkKey]:
    return {
        epoch.chunk(number)
        for epoch in scheduler._epochs.values()
        for number, status in enumerate(epoch.status)
        if status in (IDLE, HELD)
    }


def key_of(place, chunk) -> ChunkKey:
    return ChunkKey(place.name, place.epoch, chunk, place.owner)


class AnySequence(RuleBasedStateMachine):
    """Any events in any order; the model only knows what the instructions said."""

    def __init__(self):
        super().__init__()
        self.scheduler = make_scheduler(budget=7, window=2)
        self.number = 0
        self.recalled = set()
        self.passes = {}  # id -> (name, epoch, owner)
        self.cursors = {}
        self.wanted = {}  # (pass, key) -> urgent
        self.held = set()  # (pass, key)
        self.resident = {}  # key -> (address, bytes)
        self.producing = {}  # likewise
        self.failed = set()

    def follow(self):
        """Hears what readers are told, and sees what went."""
        for number, message in told(self.scheduler):
            match message:
                case ChunkReady(chunk=chunk):
                    key = key_of(self.passes[number], chunk)
                    assert self.resident[key][0] == message.address
                    self.resident[key] = message.address, message.nbytes
                    self.wanted.pop((number, key), None)
                    self.held.add((number, key))
                case ChunkFailed(chunk=chunk):
                    key = key_of(self.passes[number], chunk)
                    self.failed.add(key)
                    del self.wanted[number, key]
                case ReleaseChunks():
                    assert number in {holder for holder, _ in self.held}
                    self.recalled.add(number)
        assert there(self.scheduler) <= self.resident.keys()
        for key in self.resident.keys() - there(self.scheduler):
            assert key not in {held for _, held in self.held}
            del self.resident[key]

    def order(self):
        """Has the next chunk made, if there is any."""
        order = self.scheduler.assign()
        self.follow()
        if order is not None:
            assert order.key not in {*self.resident, *self.producing}
            self.producing[order.key] = order.address, order.max_bytes

    def pick(self, data, items):
        return data.draw(st.sampled_from(sorted(items, key=repr)))

    @rule(
        name=st.sampled_from(["train", "val"]),
        epoch=st.integers(0, 1),
        owner=st.sampled_from([None, None, 1, 2]),
        chunk=st.integers(0, 3),
    )
    def open_pass(self, name, epoch, owner, chunk):
        self.number += 1
        place = EpochKey(name, epoch if name == "train" else 0, owner)
        self.passes[self.number] = place
        self.cursors[self.number] = chunk
        self.scheduler.open_pass((self.number, 0), place, chunk)

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), chunk=st.integers(0, 3), urgent=st.booleans())
    def request(self, data, chunk, urgent):
        pass_id = self.pick(data, self.passes)
        key = key_of(self.passes[pass_id], chunk)
        if (pass_id, key) not in self.held:
            self.wanted[pass_id, key] = urgent or self.wanted.get((pass_id, key), False)
            self.failed.discard(key)
        self.scheduler.request((pass_id, 0), chunk, urgent=urgent)
        self.follow()
        if key in self.resident:  # it was lent, or is not while memory is short
            self.wanted.pop((pass_id, key), None)

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), chunk=st.integers(0, NUM_CHUNKS))
    def move(self, data, chunk):
        pass_id = self.pick(data, self.passes)
        self.cursors[pass_id] = chunk
        self.scheduler.move((pass_id, 0), chunk)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        pass_id, key = self.pick(data, self.held)
        self.held.remove((pass_id, key))
        self.scheduler.release((pass_id, 0), [key.chunk])
        self.see_what_went()

    @precondition(lambda self: self.passes)
    @rule(data=st.data())
    def close_pass(self, data):
        pass_id = self.pick(data, self.passes)
        del self.passes[pass_id]
        self.held = {pair for pair in self.held if pair[0] != pass_id}
        self.wanted = {pair: u for pair, u in self.wanted.items() if pair[0] != pass_id}
        self.scheduler.close_pass((pass_id, 0))
        self.see_what_went()

    def see_what_went(self):
        """Chunks that were made for one alone go as soon as it reads the epoch no more."""
        held = {key for _, key in self.held}
        for key in self.resident.keys() - there(self.scheduler):
            assert key not in held
            del self.resident[key]
            assert key.owner is not None
            assert key.of_epoch not in self.passes.values()

    @rule(times=st.integers(1, 4))
    def assign(self, times):
        for _ in range(times):
            self.order()

    @precondition(lambda self: self.producing)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["produced", "produced", "failed", "lost", "outgrew"]),
    )
    def finish(self, data, outcome):
        key = self.pick(data, self.producing)
        address, nbytes = self.producing.pop(key)
        if outcome == "produced":
            used = data.draw(st.sampled_from([1, nbytes]))
            self.resident[key] = address, -(-used // PAGE) * PAGE
            self.scheduler.produced(key, used)
        elif outcome == "outgrew":
            self.scheduler.outgrew(key, 2 * PAGE)
        else:
            getattr(self.scheduler, outcome)(key, ERROR)
            if outcome == "failed":
                self.failed.add(key)
        self.follow()

    @invariant()
    def nothing_overlaps_and_accounts_agree(self):
        space = self.scheduler._space
        taken = sorted([*self.resident.values(), *self.producing.values()])
        for (begin, nbytes), (after, _) in pairwise([*taken, (1 << 60, 0)]):
            assert begin + nbytes <= after
        assert sum(e - b for b, e in space._holes) == 7 * PAGE - space.used
        assert space.used == sum(n for _, n in taken)
        lent = {key for _, key in self.held}
        assert self.scheduler.lent_bytes == sum(self.resident[key][1] for key in lent)

    def teardown(self):
        """However it went, every request is answered once it is urgent and readers play along."""
        for pass_id, key in list(self.wanted):
            self.wanted[pass_id, key] = True
            self.scheduler.request((pass_id, 0), key.chunk, urgent=True)
        self.follow()
        for _ in range(200):
            self.order()
            for pass_id, key in [pair for pair in self.held if pair[0] in self.recalled]:
                self.held.remove((pass_id, key))
                self.scheduler.release((pass_id, 0), [key.chunk])
            self.see_what_went()
            if self.producing:
                key, place = self.producing.popitem()
                self.resident[key] = place
                self.scheduler.produced(key, place[1])
                self.follow()
        assert not self.wanted
        assert not self.producing


AnySequence.TestCase.settings = settings(max_examples=50, stateful_step_count=40, database=None)
TestAnySequence = pytest.mark.filterwarnings("default")(AnySequence.TestCase)


def test_who_has_waited_longest_is_served_first():
    scheduler = make_scheduler(budget=100)
    for epoch, name in enumerate("abc"):
        scheduler.open_pass((name, 0), EpochKey("train", epoch), 0)
        scheduler.request((name, 0), 0, urgent=True)
    order = []
    for _ in range(5):
        key = scheduler.assign().key
        order.append((key.epoch, key.chunk))
        scheduler.produced(key, PAGE)
        scheduler.request(("abc"[key.epoch], 0), key.chunk + 1, urgent=True)
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
