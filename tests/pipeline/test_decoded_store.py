"""The decoded store: what is the same in every epoch is done once, and nothing looks different."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.preprocessor.decoded_samples import DecodedSamples, pack
from optuna_fleet.pipeline.server.allocator import Allocator
from optuna_fleet.pipeline.server.decoded import DecodedStore


@pytest.mark.parametrize("num_samples", [1, 4])
def test_what_comes_back_takes_no_room_from_what_is_to_come(num_samples):
    store = DecodedStore({"a": 100}, 100 * 164, Allocator(0, 100 * 164))
    store.serve("a", 100)
    flying = [(order, store.lend(order, "a", num_samples)) for order in range(2)]
    for order in range(100 // num_samples):
        ended, extents = flying.pop(0)
        places = [o for begin, size in extents for o in range(begin, begin + size - 99, 100)]
        indices = range(order * num_samples, (order + 1) * num_samples)
        store.publish(ended, "a", [(i, o, 100) for i, o in zip(indices, places, strict=False)])
        flying.append((order + 2, store.lend(order + 2, "a", num_samples)))
    assert all(store.is_kept("a", index) for index in range(100))


@given(data=st.data())
@settings(max_examples=60, database=None)
def test_extents_never_overlap_and_samples_come_back(data):
    arena = Arena(3000)
    store = DecodedStore({"a": 5, "b": 9}, 3000, Allocator(0, 3000))
    samples = {}  # (name, index) -> bytes
    for name in ("a", "b"):
        store.serve(name, 150)
    reader = DecodedSamples(arena, store.table, {"a": 5, "b": 9})
    orders = {}
    for number in range(data.draw(st.integers(0, 25))):
        if orders and data.draw(st.booleans()):
            order = data.draw(st.sampled_from(sorted(orders)))
            name, writer = orders.pop(order)
            dies = data.draw(st.booleans())
            store.publish(order, name, () if dies else writer.stored())
            for index, _, _ in () if dies else writer.stored():
                samples.setdefault((name, index), True)
        else:
            name = data.draw(st.sampled_from("ab"))
            writer = DecodedSamples(arena, store.table, {"a": 5, "b": 9})
            writer.begin(store.lend(number, name, data.draw(st.integers(1, 5))))
            for index in data.draw(st.sets(st.integers(0, 4))):
                length = data.draw(st.integers(0, 60))
                writer.put(index, _packed(name, index, length))
            orders[number] = (name, writer)
        for name, index in samples:
            ((text, *_),) = reader.get(name, index)
            assert text == f"{name}{index}"
        assert store.used_bytes <= 3000


def _packed(name, index, length):
    return pack((f"{name}{index}", bytes(length)))
