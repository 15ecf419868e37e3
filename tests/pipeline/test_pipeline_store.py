"""The chunk store: examples, and any sequence of events."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from optuna_fleet.pipeline.messages import ChunkError, ChunkFailed, ChunkReady, ReleaseChunks
from optuna_fleet.pipeline.server.allocator import PAGE, Allocator, Space
from optuna_fleet.pipeline.server.epochs import Order
from optuna_fleet.pipeline.server.store import MAX_DEATHS, ChunkStore
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey

ERROR = ChunkError(summary="broken")
REFUSAL = [("a", ChunkFailed(pass_id=0, chunk=0, error=ERROR))]
NUM_CHUNKS = 6


def make_store(budget=3, window=0) -> ChunkStore:
    """Budgets in chunks, each of which is a page."""
    space = Space(budget * PAGE)
    store = ChunkStore(space, window=window, fixed=["val"])
    store.space = space
    for name in ("train", "val"):
        store.set_size(name, num_samples=NUM_CHUNKS, chunk_size=1, chunk_bytes=PAGE)
    return store


def told(store) -> list[tuple[object, object]]:
    """What readers are to be told since the last time."""
    found = list(store.outbox)
    store.outbox.clear()
    return found


def there(store) -> set[ChunkKey]:
    return {epoch.key(chunk) for epoch in store._epochs.values() for chunk in epoch.chunks}


def gone(store, action) -> list[ChunkKey]:
    """The chunks that go when something is done."""
    before = there(store)
    action()
    return sorted(before - there(store))


def produce_all(store) -> list[ChunkKey]:
    """Does all the work there is; returns its order."""
    done = []
    while order := store.assign():
        store.produced(order.key, PAGE)
        done.append(order.key)
    return done


def fill(store, name, epoch, chunks) -> None:
    """Makes chunks resident, with no pass left open."""
    store.open_pass(("filler", 0), name, epoch, 0)
    for chunk in chunks:
        store.request(("filler", 0), chunk, urgent=True)
    produce_all(store)
    store.close_pass(("filler", 0))


def drops_for(store, key) -> list[ChunkKey]:
    """What goes to make room for one more chunk."""
    store.open_pass(("new", 0), key.name, key.epoch, key.chunk)
    store.request(("new", 0), key.chunk, urgent=True)
    return gone(store, store.assign)


def test_the_beginning_of_the_next_epoch_is_work_for_idle_preprocessors() -> None:
    store = make_store(budget=100, window=3)
    store.open_pass(("a", 0), "train", 0, NUM_CHUNKS - 2, continues=True)
    made = [(key.epoch, key.chunk) for key in produce_all(store)]
    assert made == [(0, NUM_CHUNKS - 2), (0, NUM_CHUNKS - 1), (1, 0)]


def test_the_next_epoch_pushes_nothing_out() -> None:
    store = make_store(budget=2, window=3)
    store.open_pass(("a", 0), "train", 0, NUM_CHUNKS - 2, continues=True)
    assert len(produce_all(store)) == 2
    assert store.assign() is None


def test_request_is_produced_then_granted():
    store = make_store()
    store.open_pass(("a", 0), "train", 0, 0)
    store.open_pass(("b", 0), "train", 0, 0)
    key = ChunkKey("train", 0, 0)
    store.request(("a", 0), 0, urgent=True)
    store.request(("b", 0), 0, urgent=False)
    assert store.assign() == Order(key, 0, PAGE)
    assert store.assign() is None
    assert told(store) == []
    store.produced(key, 1)
    grants = [(name, ChunkReady(0, 0, 0, PAGE)) for name in "ab"]
    assert told(store) == grants
    store.request(("a", 0), 0, urgent=True)
    assert told(store) == []
    store.release(("a", 0), [0])
    store.request(("a", 0), 0, urgent=True)
    assert told(store) == grants[:1]


def test_demand_comes_before_prefetch():
    store = make_store(budget=100, window=2)
    store.open_pass(("a", 0), "train", 0, 0)
    store.open_pass(("b", 0), "train", 1, 0)
    store.request(("a", 0), 3, urgent=False)
    store.request(("b", 0), 2, urgent=True)
    order = [(key.epoch, key.chunk) for key in produce_all(store)]
    assert order == [(1, 2), (0, 3), (0, 0), (1, 0), (0, 1), (1, 1)]


def test_prefetch_stays_in_the_window_the_epoch_and_the_budget():
    store = make_store(budget=3, window=10)
    store.open_pass(("a", 0), "train", 0, 4)
    assert [key.chunk for key in produce_all(store)] == [4, 5]
    store.open_pass(("b", 0), "train", 1, 0)
    assert [key.chunk for key in produce_all(store)] == [0]


def test_what_a_whole_epoch_has_lost_is_made_again_before_it_is_asked_for():
    store = make_store(budget=NUM_CHUNKS, window=NUM_CHUNKS)
    fill(store, "train", 0, range(NUM_CHUNKS))
    for chunk in (0, 1):
        store.open_pass((chunk, 0), "val", 0, chunk)
        store.request((chunk, 0), chunk, urgent=True)
        store.produced(store.assign().key, PAGE)
        store.close_pass((chunk, 0))
    store.open_pass(("a", 0), "train", 0, 0)
    assert produce_all(store) == [ChunkKey("train", 0, 4), ChunkKey("train", 0, 5)]
    assert store.assign() is None


def test_later_epochs_go_first_and_fixed_sets_last():
    store = make_store(budget=4)
    for name, epoch in (("val", 0), ("train", 1), ("train", 0), ("train", 2)):
        fill(store, name, epoch, [0])
    assert drops_for(store, ChunkKey("train", 5, 0)) == [ChunkKey("train", 2, 0)]
    store.close_pass(("new", 0))
    order = []
    for epoch in range(6, 9):
        store.open_pass((epoch, 0), "train", epoch, 0)
        store.request((epoch, 0), 0, urgent=True)
        order += gone(store, store.assign)
    assert order == [ChunkKey("train", 1, 0), ChunkKey("train", 0, 0), ChunkKey("val", 0, 0)]


def test_what_a_reader_will_come_to_outlives_what_is_behind():
    store = make_store(budget=4)
    fill(store, "train", 5, [0, 1, 3, 4])
    store.open_pass(("a", 0), "train", 5, 2)
    order = []
    for epoch in range(6, 10):
        store.open_pass((epoch, 0), "train", epoch, 0)
        store.request((epoch, 0), 0, urgent=True)
        order += [key.chunk for key in gone(store, store.assign)]
    assert order == [1, 0, 4, 3]


def test_chunks_in_use_are_recalled_before_the_budget_is_exceeded():
    store = make_store(budget=2)
    for name in ("a", "b"):
        store.open_pass((name, 0), "train", 0, 0)
    store.request(("a", 0), 0, urgent=True)
    store.request(("b", 0), 1, urgent=True)
    assert [key.chunk for key in produce_all(store)] == [0, 1]
    store.request(("a", 0), 2, urgent=False)
    assert store.assign() is None
    store.request(("a", 0), 2, urgent=True)
    told(store)
    assert store.assign() is None
    assert told(store) == [(name, ReleaseChunks(pass_id=0)) for name in "ab"]
    assert store.assign() is None
    assert told(store) == []  # once is enough
    store.release(("b", 0), [1])
    assert store.assign() == Order(ChunkKey("train", 0, 2), PAGE, PAGE)
    assert there(store) == {ChunkKey("train", 0, 0)}


def test_chunks_are_lent_briefly_where_memory_is_short():
    store = make_store(budget=4)
    store.open_pass(("a", 0), "train", 0, 0)
    briefs = []
    for chunk in range(4):
        store.request(("a", 0), chunk, urgent=True)
        store.produced(store.assign().key, 1)
        ((_, ready),) = told(store)
        briefs.append(ready.brief)
    assert briefs == [False, False, True, True]
    store.request(("a", 0), 4, urgent=False)
    store.release(("a", 0), [2, 3])
    assert produce_all(store) == [ChunkKey("train", 0, 4)]
    assert store.residents.lent_bytes == 2 * PAGE  # the fifth waits until it is needed


def test_who_holds_chunks_leaves_room_for_the_largest_in_one_piece():
    store = make_store(budget=8)
    store.set_size("val", num_samples=NUM_CHUNKS, chunk_size=1, chunk_bytes=4 * PAGE)
    fill(store, "train", 0, range(6))
    fill(store, "train", 1, range(2))
    briefs = []
    for reader, epoch, chunk in [("a", 0, 3), ("b", 1, 1)]:  # the fourth page and the last
        store.open_pass((reader, 0), "train", epoch, chunk)
        told(store)
        store.request((reader, 0), chunk, urgent=True)
        ((_, ready),) = told(store)
        briefs.append(ready.brief)
    assert briefs == [False, True]
    store.release(("b", 0), [1])
    assert drops_for(store, ChunkKey("val", 0, 0))
    assert told(store) == []  # there is no need that the first gives its own back


def test_chunk_larger_than_expected_is_ordered_again_where_it_fits():
    store = make_store(budget=10)
    store.open_pass(("a", 0), "train", 0, 0)
    store.request(("a", 0), 0, urgent=True)
    key = store.assign().key
    store.outgrew(key, 7 * PAGE)
    assert store.assign() == Order(key, 0, 7 * PAGE)
    store.outgrew(key, 11 * PAGE)
    assert store.assign() is None
    ((_, refusal),) = told(store)
    assert isinstance(refusal, ChunkFailed)
    assert "larger memory_bytes" in refusal.error.summary


def test_failure_is_told_and_only_tried_again_on_request():
    store = make_store(window=2)
    store.open_pass(("a", 0), "train", 0, 0)
    store.request(("a", 0), 0, urgent=True)
    key = ChunkKey("train", 0, 0)
    store.assign()
    store.failed(key, ERROR)
    assert told(store) == REFUSAL
    assert key not in produce_all(store)
    store.request(("a", 0), 0, urgent=True)
    assert store.assign().key == key


def test_repeated_death_over_a_chunk_is_a_failure():
    store = make_store()
    store.open_pass(("a", 0), "train", 0, 0)
    store.request(("a", 0), 0, urgent=True)
    key = ChunkKey("train", 0, 0)
    for _ in range(MAX_DEATHS - 1):
        assert store.assign().key == key
        store.lost(key, ERROR)
        assert told(store) == []
    assert store.assign().key == key
    store.lost(key, ERROR)
    assert told(store) == REFUSAL
    assert store.assign() is None


def key_of(place, chunk) -> ChunkKey:
    return ChunkKey(place.name, place.epoch, chunk, place.owner)


class AnySequence(RuleBasedStateMachine):
    """Any events in any order; the model only knows what the instructions said."""

    def __init__(self):
        super().__init__()
        self.store = make_store(budget=7, window=2)
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
        for number, message in told(self.store):
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
        assert there(self.store) <= self.resident.keys()
        for key in self.resident.keys() - there(self.store):
            assert key not in {held for _, held in self.held}
            del self.resident[key]

    def order(self):
        """Has the next chunk made, if there is any."""
        order = self.store.assign()
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
        self.store.open_pass((self.number, 0), *place[:2], chunk, owner=owner)

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), chunk=st.integers(0, 3), urgent=st.booleans())
    def request(self, data, chunk, urgent):
        pass_id = self.pick(data, self.passes)
        key = key_of(self.passes[pass_id], chunk)
        if (pass_id, key) not in self.held:
            self.wanted[pass_id, key] = urgent or self.wanted.get((pass_id, key), False)
            self.failed.discard(key)
        self.store.request((pass_id, 0), chunk, urgent=urgent)
        self.follow()
        if key in self.resident:  # it was lent, or is not while memory is short
            self.wanted.pop((pass_id, key), None)

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), chunk=st.integers(0, NUM_CHUNKS))
    def move(self, data, chunk):
        pass_id = self.pick(data, self.passes)
        self.cursors[pass_id] = chunk
        self.store.move((pass_id, 0), chunk)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        pass_id, key = self.pick(data, self.held)
        self.held.remove((pass_id, key))
        self.store.release((pass_id, 0), [key.chunk])
        self.see_what_went()

    @precondition(lambda self: self.passes)
    @rule(data=st.data())
    def close_pass(self, data):
        pass_id = self.pick(data, self.passes)
        del self.passes[pass_id]
        self.held = {pair for pair in self.held if pair[0] != pass_id}
        self.wanted = {pair: u for pair, u in self.wanted.items() if pair[0] != pass_id}
        self.store.close_pass((pass_id, 0))
        self.see_what_went()

    def see_what_went(self):
        """Chunks that were made for one alone go as soon as it reads the epoch no more."""
        held = {key for _, key in self.held}
        there = {
            epoch.key(chunk) for epoch in self.store._epochs.values() for chunk in epoch.chunks
        }
        for key in self.resident.keys() - there:
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
            self.store.produced(key, used)
        elif outcome == "outgrew":
            self.store.outgrew(key, 2 * PAGE)
        else:
            getattr(self.store, outcome)(key, ERROR)
            if outcome == "failed":
                self.failed.add(key)
        self.follow()

    @invariant()
    def nothing_overlaps_and_accounts_agree(self):
        space = self.store.space
        taken = sorted([*self.resident.values(), *self.producing.values()])
        for (begin, nbytes), (after, _) in pairwise([*taken, (1 << 60, 0)]):
            assert begin + nbytes <= after
        assert sum(nbytes for _, nbytes in [*taken, *space.gaps]) == 7 * PAGE
        assert space.used == sum(n for _, n in taken)
        lent = {key for _, key in self.held}
        assert self.store.residents.lent_bytes == sum(self.resident[key][1] for key in lent)

    @invariant()
    def the_nearest_absent_chunk_is_found(self):
        # A failure is forgotten with the epoch: when nobody reads it and nothing of it is left.
        self.failed = {key for key in self.failed if key.of_epoch in self.store._epochs}
        known = {*self.resident, *self.producing, *self.failed}
        absent = [
            (ahead, number)
            for number, place in self.passes.items()
            for ahead in range(2)
            if (chunk := self.cursors[number] + ahead) < NUM_CHUNKS
            and key_of(place, chunk) not in known
        ]
        wanted = None
        if absent:
            ahead, number = min(absent)
            wanted = key_of(self.passes[number], self.cursors[number] + ahead)
        assert self.store._lookahead.next() == wanted

    def teardown(self):
        """However it went, every request is answered once it is urgent and readers play along."""
        for pass_id, key in list(self.wanted):
            self.wanted[pass_id, key] = True
            self.store.request((pass_id, 0), key.chunk, urgent=True)
        self.follow()
        for _ in range(200):
            self.order()
            for pass_id, key in [pair for pair in self.held if pair[0] in self.recalled]:
                self.held.remove((pass_id, key))
                self.store.release((pass_id, 0), [key.chunk])
            self.see_what_went()
            if self.producing:
                key, place = self.producing.popitem()
                self.resident[key] = place
                self.store.produced(key, place[1])
                self.follow()
        assert not self.wanted
        assert not self.producing


AnySequence.TestCase.settings = settings(max_examples=150, stateful_step_count=40, database=None)
TestAnySequence = pytest.mark.filterwarnings("default")(AnySequence.TestCase)


@given(st.data())
@settings(database=None)
def test_pieces_never_overlap_and_come_back_as_one(data):
    free = Allocator(100, 200)
    taken = []
    for _ in range(data.draw(st.integers(0, 40))):
        if taken and data.draw(st.booleans()):
            free.free(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        elif (begin := free.allocate(nbytes := data.draw(st.integers(1, 30)))) is not None:
            taken.append((begin, nbytes))
        else:
            assert all(length < nbytes for _, length in free)
        cells = [
            cell for begin, nbytes in [*free, *taken] for cell in range(begin, begin + nbytes)
        ]
        assert sorted(cells) == list(range(100, 200))
    for piece in taken:
        free.free(*piece)
    assert list(free) == [(100, 100)]
