"""The chunk store: examples, and any sequence of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from optuna_fleet.pipeline.messages import ChunkError
from optuna_fleet.pipeline.server.instructions import Drop, Grant, Produce, Recall, Refuse
from optuna_fleet.pipeline.server.store import MAX_DEATHS, ChunkStore
from optuna_fleet.pipeline.spec import ChunkKey

ERROR = ChunkError(summary="broken")
NUM_CHUNKS = 6


def make_store(budget=3, window=0, max_chunks=100, disk=0) -> ChunkStore:
    store = ChunkStore(
        memory_bytes=budget,
        disk_bytes=disk,
        max_chunks=max_chunks,
        window=window,
        fixed=["val"],
    )
    for name in ("train", "val"):
        store.set_size(name, num_chunks=NUM_CHUNKS, chunk_bytes=1)
    return store


def produce_all(store) -> list[ChunkKey]:
    """Does all the work there is; returns its order."""
    done = []
    while works := [i.key for i in store.assign() if isinstance(i, Produce)]:
        store.produced(works[0], 1)
        done += works
    return done


def fill(store, name, epoch, chunks) -> None:
    """Makes chunks resident, with no pass left open."""
    store.open_pass("filler", name, epoch, 0)
    for chunk in chunks:
        store.request("filler", chunk, urgent=True)
    produce_all(store)
    store.close_pass("filler")


def dropped(instructions) -> list[ChunkKey]:
    return [i.key for i in instructions if isinstance(i, Drop)]


def drops_for(store, key) -> list[ChunkKey]:
    """What goes to make room for one more chunk."""
    store.open_pass("new", key.name, key.epoch, key.chunk)
    store.request("new", key.chunk, urgent=True)
    return dropped(store.assign())


def test_the_beginning_of_the_next_epoch_is_work_for_idle_preprocessors() -> None:
    store = ChunkStore(memory_bytes=1000, max_chunks=100, window=3)
    store.set_size("train", num_chunks=4, chunk_bytes=10)
    store.open_pass("a", "train", 0, 2, continues=True)
    order = []
    while instructions := store.assign():
        (produce,) = instructions
        order.append(tuple(produce.key)[1:])
        store.produced(produce.key, 10)
    assert order == [(0, 2), (0, 3), (1, 0)]


def test_the_next_epoch_pushes_nothing_out() -> None:
    store = ChunkStore(memory_bytes=20, max_chunks=100, window=3)
    store.set_size("train", num_chunks=4, chunk_bytes=10)
    store.open_pass("a", "train", 0, 2, continues=True)
    for _ in (2, 3):
        (produce,) = store.assign()
        store.produced(produce.key, 10)
    assert store.assign() == []


def test_request_is_produced_then_granted():
    store = make_store()
    store.open_pass("a", "train", 0, 0)
    store.open_pass("b", "train", 0, 0)
    key = ChunkKey("train", 0, 0)
    assert store.request("a", 0, urgent=True) == store.request("b", 0, urgent=False) == []
    assert store.assign() == [Produce(key=key, max_bytes=1)]
    assert store.assign() == []
    assert store.produced(key, 1) == [Grant(pass_id="a", key=key), Grant(pass_id="b", key=key)]
    assert store.request("a", 0, urgent=True) == []
    store.release("a", [0])
    assert store.request("a", 0, urgent=True) == [Grant(pass_id="a", key=key)]


def test_demand_comes_before_prefetch():
    store = make_store(budget=100, window=2)
    store.open_pass("a", "train", 0, 0)
    store.open_pass("b", "train", 1, 0)
    store.request("a", 3, urgent=False)
    store.request("b", 2, urgent=True)
    order = [(key.epoch, key.chunk) for key in produce_all(store)]
    assert order == [(1, 2), (0, 3), (0, 0), (1, 0), (0, 1), (1, 1)]


def test_prefetch_stays_in_the_window_the_epoch_and_the_budget():
    store = make_store(budget=3, window=10)
    store.open_pass("a", "train", 0, 4)
    assert [key.chunk for key in produce_all(store)] == [4, 5]
    store.open_pass("b", "train", 1, 0)
    assert [key.chunk for key in produce_all(store)] == [0]


def test_what_a_whole_epoch_has_lost_is_made_again_before_it_is_asked_for():
    store = make_store(budget=NUM_CHUNKS, window=NUM_CHUNKS)
    fill(store, "train", 0, range(NUM_CHUNKS))
    store.set_budget("memory", NUM_CHUNKS - 2)
    store.set_budget("memory", NUM_CHUNKS)
    store.open_pass("a", "train", 0, 0)
    assert produce_all(store) == [ChunkKey("train", 0, 4), ChunkKey("train", 0, 5)]
    assert store.assign() == []


def test_later_epochs_go_first_and_fixed_sets_last():
    store = make_store(budget=4)
    for name, epoch in (("val", 0), ("train", 1), ("train", 0), ("train", 2)):
        fill(store, name, epoch, [0])
    assert drops_for(store, ChunkKey("train", 5, 0)) == [ChunkKey("train", 2, 0)]
    store.close_pass("new")
    order = []
    for epoch in range(6, 9):
        store.open_pass(epoch, "train", epoch, 0)
        store.request(epoch, 0, urgent=True)
        order += dropped(store.assign())
    assert order == [ChunkKey("train", 1, 0), ChunkKey("train", 0, 0), ChunkKey("val", 0, 0)]


def test_what_a_reader_will_come_to_outlives_what_is_behind():
    store = make_store(budget=4)
    fill(store, "train", 5, [0, 1, 3, 4])
    store.open_pass("a", "train", 5, 2)
    order = []
    for epoch in range(6, 10):
        store.open_pass(epoch, "train", epoch, 0)
        store.request(epoch, 0, urgent=True)
        order += [key.chunk for key in dropped(store.assign())]
    assert order == [1, 0, 4, 3]


def test_chunks_in_use_are_recalled_before_the_budget_is_exceeded():
    store = make_store(budget=2)
    for name in ("a", "b"):
        store.open_pass(name, "train", 0, 0)
    store.request("a", 0, urgent=True)
    store.request("b", 1, urgent=True)
    assert [key.chunk for key in produce_all(store)] == [0, 1]
    store.request("a", 2, urgent=False)
    assert store.assign() == []
    store.request("a", 2, urgent=True)
    assert store.assign() == [Recall(pass_id="a"), Recall(pass_id="b")]
    assert store.assign() == []  # once is enough
    store.release("b", [1])
    produce = Produce(key=ChunkKey("train", 0, 2), max_bytes=1)
    assert store.assign() == [Drop(key=ChunkKey("train", 0, 1)), produce]


def test_chunks_are_lent_briefly_where_memory_is_short():
    store = make_store(budget=4)
    store.open_pass("a", "train", 0, 0)
    briefs = []
    for chunk in range(4):
        store.request("a", chunk, urgent=True)
        (produce,) = store.assign()
        (grant,) = store.produced(produce.key, 1)
        briefs.append(grant.brief)
    assert briefs == [False, False, True, True]
    store.request("a", 4, urgent=False)
    store.release("a", [2, 3])
    assert produce_all(store) == [ChunkKey("train", 0, 4)]
    assert store.lent_bytes() == 2  # the fifth waits until it is needed


def test_chunk_larger_than_expected_is_ordered_again_where_it_fits():
    store = make_store(budget=10)
    store.open_pass("a", "train", 0, 0)
    store.request("a", 0, urgent=True)
    (produce,) = store.assign()
    store.outgrew(produce.key, 7)
    assert store.assign() == [Produce(key=produce.key, max_bytes=7)]
    store.outgrew(produce.key, 11)
    (refusal,) = store.assign()
    assert isinstance(refusal, Refuse)
    assert "larger memory_bytes" in refusal.error.summary


def test_what_does_not_fit_into_memory_goes_to_the_disk_before_anything_is_dropped():
    store = make_store(budget=2, disk=2)
    store.open_pass("a", "train", 0, 0)
    places, drops = [], []
    for chunk in range(6):
        store.move("a", chunk)
        store.request("a", chunk, urgent=True)
        *gone, produce = store.assign()
        drops += [drop.key.chunk for drop in gone]
        places.append(produce.place)
        store.produced(produce.key, 1)
        store.release("a", [chunk])
    assert places == ["memory", "memory", "disk", "disk", "disk", "disk"]
    assert drops == [3, 4]  # a reader to come begins at chunk 0
    assert (store.resident_bytes("memory"), store.resident_bytes("disk")) == (2, 2)


def test_disk_that_failed_is_not_used_again():
    store = make_store(budget=1, disk=5)
    store.open_pass("a", "train", 0, 0)
    store.request("a", 0, urgent=True)
    store.request("a", 1, urgent=True)
    first, second = store.assign(), store.assign()
    assert [order.place for order in (*first, *second)] == ["memory", "disk"]
    store.produced(first[0].key, 1)
    store.disk_failed(second[0].key)
    assert store.assign() == [Recall(pass_id="a")]


def test_smaller_budget_holds_at_once():
    store = make_store(budget=4)
    fill(store, "train", 0, [0, 1, 2, 3])
    assert dropped(store.set_budget("memory", 2)) == [
        ChunkKey("train", 0, 3),
        ChunkKey("train", 0, 2),
    ]


def test_number_of_files_is_limited():
    store = make_store(budget=100, window=6, max_chunks=3)
    store.open_pass("a", "train", 0, 0)
    assert len(produce_all(store)) == 3


def test_failure_is_told_and_only_tried_again_on_request():
    store = make_store(window=2)
    store.open_pass("a", "train", 0, 0)
    store.request("a", 0, urgent=True)
    key = ChunkKey("train", 0, 0)
    store.assign()
    assert store.failed(key, ERROR) == [Refuse(pass_id="a", key=key, error=ERROR)]
    assert key not in produce_all(store)
    store.request("a", 0, urgent=True)
    assert store.assign() == [Produce(key=key, max_bytes=1)]


def test_repeated_death_over_a_chunk_is_a_failure():
    store = make_store()
    store.open_pass("a", "train", 0, 0)
    store.request("a", 0, urgent=True)
    key = ChunkKey("train", 0, 0)
    for _ in range(MAX_DEATHS - 1):
        assert store.assign() == [Produce(key=key, max_bytes=1)]
        assert store.lost(key, ERROR) == []
    assert store.assign() == [Produce(key=key, max_bytes=1)]
    assert store.lost(key, ERROR) == [Refuse(pass_id="a", key=key, error=ERROR)]
    assert store.assign() == []


class AnySequence(RuleBasedStateMachine):
    """Any events in any order; the model only knows what the instructions said."""

    def __init__(self):
        super().__init__()
        self.store = make_store(budget=5, window=2, disk=2)
        self.number = 0
        self.recalled = set()
        self.passes = {}  # id -> (name, epoch)
        self.wanted = {}  # (pass, key) -> urgent
        self.held = set()  # (pass, key)
        self.resident = set()
        self.producing = []

    def follow(self, instructions):
        for instruction in instructions:
            match instruction:
                case Grant(pass_id=pass_id, key=key):
                    assert key in self.resident
                    self.wanted.pop((pass_id, key), None)
                    self.held.add((pass_id, key))
                case Refuse(pass_id=pass_id, key=key):
                    del self.wanted[pass_id, key]
                case Drop(key=key):
                    assert key not in {held for _, held in self.held}
                    self.resident.remove(key)
                case Produce(key=key):
                    assert key not in self.resident
                    assert key not in self.producing
                    self.producing.append(key)
                case Recall(pass_id=pass_id):
                    assert pass_id in {holder for holder, _ in self.held}
                    self.recalled.add(pass_id)

    def pick(self, data, items):
        return data.draw(st.sampled_from(sorted(items, key=repr)))

    @rule(name=st.sampled_from(["train", "val"]), epoch=st.integers(0, 1), chunk=st.integers(0, 3))
    def open_pass(self, name, epoch, chunk):
        self.number += 1
        self.passes[self.number] = (name, epoch if name == "train" else 0)
        self.store.open_pass(self.number, *self.passes[self.number], chunk)

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), chunk=st.integers(0, 3), urgent=st.booleans())
    def request(self, data, chunk, urgent):
        pass_id = self.pick(data, self.passes)
        key = ChunkKey(*self.passes[pass_id], chunk)
        if (pass_id, key) not in self.held:
            self.wanted[pass_id, key] = urgent or self.wanted.get((pass_id, key), False)
        self.follow(self.store.request(pass_id, chunk, urgent=urgent))

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), chunk=st.integers(0, NUM_CHUNKS))
    def move(self, data, chunk):
        self.store.move(self.pick(data, self.passes), chunk)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        pass_id, key = self.pick(data, self.held)
        self.held.remove((pass_id, key))
        self.store.release(pass_id, [key.chunk])

    @precondition(lambda self: self.passes)
    @rule(data=st.data())
    def close_pass(self, data):
        pass_id = self.pick(data, self.passes)
        del self.passes[pass_id]
        self.held = {pair for pair in self.held if pair[0] != pass_id}
        self.wanted = {pair: u for pair, u in self.wanted.items() if pair[0] != pass_id}
        self.store.close_pass(pass_id)

    @rule(times=st.integers(1, 4))
    def assign(self, times):
        for _ in range(times):
            self.follow(self.store.assign())

    @precondition(lambda self: self.producing)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["produced", "produced", "failed", "lost", "outgrew"]),
    )
    def finish(self, data, outcome):
        key = self.pick(data, self.producing)
        self.producing.remove(key)
        if outcome == "produced":
            self.resident.add(key)
            self.follow(self.store.produced(key, 1))
        elif outcome == "outgrew":
            self.store.outgrew(key, 1)
        else:
            self.follow(getattr(self.store, outcome)(key, ERROR))

    @invariant()
    def accounts_agree(self):
        in_memory, on_disk = (self.store.resident_bytes(place) for place in ("memory", "disk"))
        assert in_memory + on_disk == self.store.num_resident == len(self.resident)
        lent = self.store.lent_bytes("memory") + self.store.lent_bytes("disk")
        assert lent == len({key for _, key in self.held})

    @invariant()
    def budgets_are_kept(self):
        assert self.store.planned_bytes() <= 5
        assert self.store.resident_bytes("disk") <= 2
        assert len(self.resident) + len(self.producing) <= 7

    def teardown(self):
        """However it went, every request is answered once it is urgent and readers play along."""
        for pass_id, key in list(self.wanted):
            self.wanted[pass_id, key] = True
            self.follow(self.store.request(pass_id, key.chunk, urgent=True))
        for _ in range(200):
            self.follow(self.store.assign())
            for pass_id, key in [pair for pair in self.held if pair[0] in self.recalled]:
                self.held.remove((pass_id, key))
                self.store.release(pass_id, [key.chunk])
            if self.producing:
                key = self.producing.pop()
                self.resident.add(key)
                self.follow(self.store.produced(key, 1))
        assert not self.wanted
        assert not self.producing


AnySequence.TestCase.settings = settings(max_examples=150, stateful_step_count=40, database=None)
TestAnySequence = pytest.mark.filterwarnings("default")(AnySequence.TestCase)
