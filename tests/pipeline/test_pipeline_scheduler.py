"""The scheduler: examples, and any sequence of events."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from optuna_fleet.pipeline.pipeline_messages import (
    ChunkError,
    ChunkFailed,
    ChunkReady,
    ProduceChunk,
    ReleaseChunks,
)
from optuna_fleet.pipeline.server.epochs import HELD, IDLE, PAGE, Size, Space
from optuna_fleet.pipeline.server.scheduler import Scheduler
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey

ERROR = ChunkError(summary="broken")
REFUSAL = [("a", ChunkFailed(pass_id=0, chunk=0, error=ERROR))]
NUM_CHUNKS = 6


def order(key, address, nbytes) -> ProduceChunk:
    return ProduceChunk(key=key, chunk_size=1, address=address, max_bytes=nbytes)


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


def gone(scheduler, action) -> list[ChunkKey]:
    """The chunks that go when something is done."""
    before = there(scheduler)
    action()
    return sorted(before - there(scheduler))


def produce_all(scheduler) -> list[ChunkKey]:
    """Does all the work there is; returns its order."""
    done = []
    while found := scheduler.assign():
        scheduler.produced(found.key, PAGE)
        done.append(found.key)
    return done


def fill(scheduler, name, epoch, chunks) -> None:
    """Makes chunks resident, with no pass left open."""
    scheduler.open_pass(("filler", 0), EpochKey(name, epoch), 0)
    for chunk in chunks:
        scheduler.request(("filler", 0), chunk, urgent=True)
    produce_all(scheduler)
    scheduler.close_pass(("filler", 0))


@pytest.mark.parametrize(("budget", "begun"), [(100, [(1, 0)]), (2, [])])
def test_the_next_epoch_is_begun_where_it_pushes_nothing_out(budget, begun) -> None:
    scheduler = make_scheduler(budget=budget, window=3)
    scheduler.open_pass(("a", 0), EpochKey("train", 0), NUM_CHUNKS - 2, continues=True)
    made = [(key.epoch, key.chunk) for key in produce_all(scheduler)]
    assert made == [(0, NUM_CHUNKS - 2), (0, NUM_CHUNKS - 1), *begun]


def test_request_is_produced_then_granted():
    scheduler = make_scheduler()
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 0)
    scheduler.open_pass(("b", 0), EpochKey("train", 0), 0)
    key = ChunkKey("train", 0, 0)
    scheduler.request(("a", 0), 0, urgent=True)
    scheduler.request(("b", 0), 0, urgent=False)
    assert scheduler.assign() == order(key, 0, PAGE)
    assert scheduler.assign() is None
    assert told(scheduler) == []
    scheduler.produced(key, 1)
    grants = [(name, ChunkReady(0, 0, 0, PAGE)) for name in "ab"]
    assert told(scheduler) == grants
    scheduler.request(("a", 0), 0, urgent=True)
    assert told(scheduler) == []
    scheduler.release(("a", 0), [0])
    scheduler.request(("a", 0), 0, urgent=True)
    assert told(scheduler) == grants[:1]


def test_demand_comes_before_prefetch():
    scheduler = make_scheduler(budget=100, window=2)
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 0)
    scheduler.open_pass(("b", 0), EpochKey("train", 1), 0)
    scheduler.request(("a", 0), 3, urgent=False)
    scheduler.request(("b", 0), 2, urgent=True)
    order = [(key.epoch, key.chunk) for key in produce_all(scheduler)]
    assert order == [(1, 2), (0, 3), (0, 0), (1, 0), (0, 1), (1, 1)]


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


def test_prefetch_stays_in_the_window_the_epoch_and_the_budget():
    scheduler = make_scheduler(budget=3, window=10)
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 4)
    assert [key.chunk for key in produce_all(scheduler)] == [4, 5]
    scheduler.open_pass(("b", 0), EpochKey("train", 1), 0)
    assert [key.chunk for key in produce_all(scheduler)] == [0]


def test_what_a_whole_epoch_has_lost_is_made_again_before_it_is_asked_for():
    scheduler = make_scheduler(budget=NUM_CHUNKS, window=NUM_CHUNKS)
    fill(scheduler, "train", 0, range(NUM_CHUNKS))
    for chunk in (0, 1):
        scheduler.open_pass((chunk, 0), EpochKey("val", 0), chunk)
        scheduler.request((chunk, 0), chunk, urgent=True)
        scheduler.produced(scheduler.assign().key, PAGE)
        scheduler.close_pass((chunk, 0))
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 0)
    assert produce_all(scheduler) == [ChunkKey("train", 0, 4), ChunkKey("train", 0, 5)]
    assert scheduler.assign() is None


def drops_for_others(scheduler, epochs) -> list[ChunkKey]:
    """What goes, in this order, for the first chunks of these epochs."""
    order = []
    for epoch in epochs:
        scheduler.open_pass((epoch, 0), EpochKey("train", epoch), 0)
        scheduler.request((epoch, 0), 0, urgent=True)
        order += gone(scheduler, scheduler.assign)
    return order


def test_later_epochs_go_first_and_fixed_sets_last():
    scheduler = make_scheduler(budget=4)
    for name, epoch in (("val", 0), ("train", 1), ("train", 0), ("train", 2)):
        fill(scheduler, name, epoch, [0])
    order = [(key.name, key.epoch) for key in drops_for_others(scheduler, range(6, 10))]
    assert order == [("train", 2), ("train", 1), ("train", 0), ("val", 0)]


def test_what_a_reader_will_come_to_outlives_what_is_behind():
    scheduler = make_scheduler(budget=4)
    fill(scheduler, "train", 5, [0, 1, 3, 4])
    scheduler.open_pass(("a", 0), EpochKey("train", 5), 2)
    assert [key.chunk for key in drops_for_others(scheduler, range(6, 10))] == [1, 0, 4, 3]


def test_chunks_in_use_are_recalled_before_the_budget_is_exceeded():
    scheduler = make_scheduler(budget=2)
    for name in ("a", "b"):
        scheduler.open_pass((name, 0), EpochKey("train", 0), 0)
    scheduler.request(("a", 0), 0, urgent=True)
    scheduler.request(("b", 0), 1, urgent=True)
    assert [key.chunk for key in produce_all(scheduler)] == [0, 1]
    scheduler.request(("a", 0), 2, urgent=False)
    assert scheduler.assign() is None
    scheduler.request(("a", 0), 2, urgent=True)
    told(scheduler)
    assert scheduler.assign() is None
    assert told(scheduler) == [(name, ReleaseChunks(pass_id=0)) for name in "ab"]
    assert scheduler.assign() is None
    assert told(scheduler) == []  # once is enough
    scheduler.release(("b", 0), [1])
    assert scheduler.assign() == order(ChunkKey("train", 0, 2), PAGE, PAGE)
    assert there(scheduler) == {ChunkKey("train", 0, 0)}


def test_chunks_are_lent_briefly_where_memory_is_short():
    scheduler = make_scheduler(budget=4)
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 0)
    briefs = []
    for chunk in range(4):
        scheduler.request(("a", 0), chunk, urgent=True)
        scheduler.produced(scheduler.assign().key, 1)
        ((_, ready),) = told(scheduler)
        briefs.append(ready.brief)
    assert briefs == [False, False, True, True]
    scheduler.request(("a", 0), 4, urgent=False)
    scheduler.release(("a", 0), [2, 3])
    assert produce_all(scheduler) == [ChunkKey("train", 0, 4)]
    assert scheduler.lent_bytes == 2 * PAGE  # the fifth waits until it is needed


def test_who_holds_chunks_leaves_room_for_the_largest_in_one_piece():
    scheduler = make_scheduler(budget=8)
    scheduler.sizes["val"] = size(4 * PAGE)
    fill(scheduler, "train", 0, range(6))
    fill(scheduler, "train", 1, range(2))
    briefs = []
    for reader, epoch, chunk in [("a", 0, 3), ("b", 1, 1)]:  # the fourth page and the last
        scheduler.open_pass((reader, 0), EpochKey("train", epoch), chunk)
        told(scheduler)
        scheduler.request((reader, 0), chunk, urgent=True)
        ((_, ready),) = told(scheduler)
        briefs.append(ready.brief)
    assert briefs == [False, True]
    scheduler.release(("b", 0), [1])
    scheduler.open_pass(("new", 0), EpochKey("val", 0), 0)
    scheduler.request(("new", 0), 0, urgent=True)
    assert gone(scheduler, scheduler.assign)
    assert told(scheduler) == []  # there is no need that the first gives its own back


def test_chunk_larger_than_expected_is_ordered_again_where_it_fits():
    scheduler = make_scheduler(budget=10)
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 0)
    scheduler.request(("a", 0), 0, urgent=True)
    key = scheduler.assign().key
    scheduler.outgrew(key, 7 * PAGE)
    assert scheduler.assign() == order(key, 0, 7 * PAGE)
    scheduler.outgrew(key, 11 * PAGE)
    assert scheduler.assign() is None
    ((_, refusal),) = told(scheduler)
    assert isinstance(refusal, ChunkFailed)
    assert "larger memory_bytes" in refusal.error.summary


def test_failure_is_told_and_only_tried_again_on_request():
    scheduler = make_scheduler(window=2)
    scheduler.open_pass(("a", 0), EpochKey("train", 0), 0)
    scheduler.request(("a", 0), 0, urgent=True)
    key = ChunkKey("train", 0, 0)
    scheduler.assign()
    scheduler.failed(key, ERROR)
    assert told(scheduler) == REFUSAL
    assert key not in produce_all(scheduler)
    scheduler.request(("a", 0), 0, urgent=True)
    assert scheduler.assign().key == key


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


AnySequence.TestCase.settings = settings(max_examples=150, stateful_step_count=40, database=None)
TestAnySequence = pytest.mark.filterwarnings("default")(AnySequence.TestCase)


@given(st.data())
@settings(database=None)
def test_pieces_never_overlap_and_come_back_as_one(data):
    space = Space(100 * PAGE)
    taken = []
    for _ in range(data.draw(st.integers(0, 40))):
        if taken and data.draw(st.booleans()):
            space.free(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            nbytes = data.draw(st.integers(1, 30)) * PAGE
            if (begin := space.allocate(nbytes)) is not None:
                taken.append((begin, nbytes))
            else:
                assert all(end - begin < nbytes for begin, end in space._holes)
        holes = [(begin, end - begin) for begin, end in space._holes]
        cells = [c for begin, n in [*holes, *taken] for c in range(begin, begin + n, PAGE)]
        assert sorted(cells) == list(range(0, 100 * PAGE, PAGE))
        assert space.used == sum(n for _, n in taken)
    for piece in taken:
        space.free(*piece)
    assert space._holes == [(0, 100 * PAGE)]
