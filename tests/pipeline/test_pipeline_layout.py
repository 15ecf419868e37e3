import collections
import datetime
import mmap
import pickle
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import tv_tensors

from optuna_fleet.pipeline.chunks import pickling
from optuna_fleet.pipeline.chunks.chunk_view import ChunkView, cut_batch
from optuna_fleet.pipeline.chunks.layout import chunk_in_memory

Point = collections.namedtuple("Point", "x y")


def bits(value: Any) -> Any:
    """Everything that must survive a chunk, in a form that ``==`` compares."""
    kind = type(value)
    if kind in (list, tuple, Point):
        return kind, [bits(item) for item in value]
    if isinstance(value, dict):
        return kind, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, torch.Tensor):
        looks = value.dtype, value.shape, value.layout, value.requires_grad, vars(value)
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        return kind, *looks, pickling.raw_bytes(plain).tolist()
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, value.tobytes()
    return kind, pickle.dumps(value)


def view(samples: list[Any], *, collated_by_user: bool = False) -> ChunkView:
    return ChunkView(chunk_in_memory(samples, collated_by_user=collated_by_user))


SAMPLES = {
    "tensor": lambda i: torch.full((3, 2), float(i)),
    "bfloat16": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "transposed": lambda i: torch.arange(6).view(2, 3).t() + i,
    "large": lambda i: (torch.arange(9000).view(9, 1000).t(), i + np.arange(9e3).reshape(9, -1).T),
    "large conjugate": lambda i: torch.full((2000,), i * 1j).conj(),
    "empty tensor": lambda i: (torch.empty(0, 3), i),
    "0-dim": lambda i: torch.tensor(i),
    "array": lambda i: np.full((2, 2), i, dtype=np.uint8),
    "0-dim array": lambda i: np.array(i, dtype=np.float32),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "np.float32": lambda i: np.float32(i / 3),
    "np.int32": lambda i: np.int32(i),
    "str": lambda i: f"name {i}",
    "pair": lambda i: (torch.full((5,), i), i),
    "strings in a pair": lambda i: (f"name {i}", b"bytes"),
    "strings in a dict": lambda i: {"name": f"name {i}", "pair": (f"{i}", i)},
    "list": lambda i: [i, [i, f"{i}"]],
    "namedtuple": lambda i: Point(torch.full((2,), i), {"z": (i, f"{i}")}),
    "empty tuple": lambda i: (),
    "ordered dict": lambda i: collections.OrderedDict(a=i, b=f"{i}"),
    "tv_tensor": lambda i: (tv_tensors.Image(torch.full((1, 2, 2), i)), i),
    "key order": lambda i: {"a": i, "b": 1} if i % 2 else {"b": 1, "a": i},
}


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_batches_equal_default_collate(make):
    samples = [make(i) for i in range(10)]
    one, other = view(samples[:6]), view(samples[6:])
    for parts, wanted in (
        ([(one, 0, 6)], samples[:6]),
        ([(one, 2, 3)], samples[2:3]),
        ([(one, 1, 6), (other, 0, 3)], samples[1:9]),
    ):
        assert bits(cut_batch(parts, None)) == bits(default_collate(wanted))


class Halved(collections.namedtuple("Halved", "x label")):
    def __new__(cls, x, label):
        return super().__new__(cls, x / 2, label)


def test_namedtuples_that_compute_are_called_with_tensors_alone():
    samples = [Halved(torch.full((2,), 8.0 * i), f"{i}") for i in range(4)]
    chunk, other = view(samples), view([samples[0], Halved(torch.zeros(2), 3)])
    for parts, wanted in (
        ([(chunk, 0, 4)], samples),
        ([(chunk, 1, 3), (chunk, 0, 2)], [*samples[1:3], *samples[:2]]),
        ([(chunk, 3, 4), (other, 0, 1)], [samples[3], samples[0]]),
    ):
        got, expected = cut_batch(parts, None), default_collate(wanted)
        assert type(got) is Halved
        assert torch.equal(got.x, expected.x)
        assert got.label == expected.label


def test_batch_of_samples_that_are_alike_is_not_copied():
    chunk = view([torch.full((16,), float(i)) for i in range(8)])
    one = cut_batch([(chunk, 4, 8)], None)
    one.zero_()
    assert not cut_batch([(chunk, 4, 8)], None).any()


def test_batches_are_aligned_wherever_they_begin():
    chunk = view([(torch.full((3,), float(i)), i) for i in range(8)])
    for start in range(7):
        for tensor in cut_batch([(chunk, start, start + 2)], None):
            assert tensor.data_ptr() % 64 == 0


TORCH_DTYPES = [
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint16, torch.uint64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = st.lists(st.integers(0, 4), max_size=3)
KEYS = st.text("ab", max_size=2) | st.integers(0, 2) | st.booleans()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(SHAPES)
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).view(shape)
    if draw(st.booleans()):
        tensor = tensor.mT if tensor.ndim > 1 else tensor[::2] if tensor.ndim else tensor
    match draw(st.integers(0, 9)):
        case 0 if dtype in (torch.float32, torch.complex64):
            tensor = tensor.clone().requires_grad_()
        case 1 if dtype is torch.complex64:
            tensor = tensor.conj()
        case 2:
            tensor = tv_tensors.Image(torch.zeros(1, *shape, 1))
        case 3 if dtype in (torch.float32, torch.bfloat16):  # torch can't pickle them all
            tensor.note = "mine"
    return tensor


PLAIN_ARRAYS = arrays.arrays(arrays.array_dtypes() | arrays.scalar_dtypes(), arrays.array_shapes())
NUMBERS = st.integers() | st.floats() | st.booleans() | arrays.from_dtype(np.dtype("f4"))
LEAVES = (
    *(tensors(), PLAIN_ARRAYS, NUMBERS, st.none(), st.text(max_size=3), st.binary(max_size=3)),
    arrays.scalar_dtypes().flatmap(arrays.from_dtype),
    st.sampled_from([torch.Size([2]), datetime.date(2020, 1, 1), np.array(3.0), np.array(None)]),
    st.sampled_from([np.zeros((0, 3)), np.arange(3)[::-1], np.arange(6).reshape(2, 3).T]),
)
NESTS = st.recursive(
    st.one_of(LEAVES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(KEYS, inner, max_size=2)
    ),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@settings(max_examples=100)
@given(st.lists(NESTS, min_size=1, max_size=3))
def test_collate_fn_gets_any_sample_bit_for_bit(samples):
    chunk = view(samples, collated_by_user=True)
    assert bits(cut_batch([(chunk, 0, len(samples))], list)) == bits(samples)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@settings(max_examples=100)
@given(st.one_of(LEAVES), st.lists(NESTS, max_size=2), st.integers(1, 3))
def test_default_collate_of_any_samples(leaf, more, count):
    samples = [*[(leaf, i) for i in range(count)], *more]
    try:
        wanted = default_collate(samples)
    except Exception as error:
        with pytest.raises((type(error), ValueError)):  # of a reversed array before all else
            cut_batch([(view(samples[:count]), 0, count), *unlike(more)], None)
        return
    got = cut_batch([(view(samples[:count]), 0, count), *unlike(more)], None)
    assert bits(got) == bits(wanted)


def unlike(samples: list[Any]) -> list[Any]:
    return [(view([sample]), 0, 1) for sample in samples]


def test_samples_of_unlike_shape_are_views_that_one_may_write_to():
    samples = [{"x": torch.ones(i, 3), "a": np.ones(i), "none": None} for i in range(1, 5)]
    samples[0]["a"].flags.writeable = False
    chunk = view(samples, collated_by_user=True)
    for sample in chunk.samples(0, 4):
        for address in (sample["x"].data_ptr(), sample["a"].ctypes.data):
            assert address % 64 == 0
        sample["x"].zero_()
        sample["a"][:] = 0
    # What was written is seen when they are read again, so there is no copy.
    assert not any(sample["x"].any() or sample["a"].any() for sample in chunk.samples(0, 4))


@pytest.mark.parametrize("collate", [None, list])
def test_a_view_knows_whether_it_is_used(collate):
    written = view([torch.arange(8)] * 4, collated_by_user=collate is not None).memory
    memory = mmap.mmap(-1, written.nbytes)
    memory[:] = bytes(written)
    chunk = ChunkView(np.frombuffer(memory, np.uint8))
    part = cut_batch([(chunk, 1, 3)], collate)[1][2:]
    assert chunk.is_used()
    assert cut_batch([(chunk, 0, 1)], collate)[0].tolist() == list(range(8))
    del part
    assert not chunk.is_used()


class InterruptedOnce(weakref.ref):
    left: ClassVar = [KeyboardInterrupt]

    def __call__(self):
        while self.left:
            raise self.left.pop()
        return super().__call__()


def test_an_interrupted_view_still_knows_whether_it_is_used(monkeypatch):
    monkeypatch.setattr(weakref, "ref", InterruptedOnce)
    chunk = view([torch.arange(8)] * 4)
    kept = cut_batch([(chunk, 0, 2)], None)
    with pytest.raises(KeyboardInterrupt):
        chunk.is_used()
    assert chunk.is_used()
    assert torch.equal(cut_batch([(chunk, 0, 2)], None), kept)


def test_one_tensor_twice_in_a_sample_stays_one():
    one = torch.ones(3)
    ((left, right),) = view([(one, one)], collated_by_user=True).samples(0, 1)
    assert left is right


def test_object_of_main_beside_arrays():
    local = type("Local", (), {"__module__": "__main__"})
    item = local()
    item.x = torch.arange(3)
    sample = (torch.ones(5), np.arange(2), item)
    ((ones, array, got),) = view([sample], collated_by_user=True).samples(0, 1)
    assert bits([ones, array, got.x]) == bits([sample[0], sample[1], item.x])


class Name(str):
    pass


@pytest.mark.parametrize("by_whom", ["all", "readers"])
@pytest.mark.parametrize("kind", [str, Name, torch.Tensor, tv_tensors.Image])
def test_what_is_registered_with_default_collate_holds(kind, by_whom, monkeypatch):
    samples = [(torch.ones(3), Name(i), "x", tv_tensors.Image(torch.ones(1, 2, 2))) for i in "abc"]
    if by_whom == "readers":  # then preprocessors make tensors of tensors of any class
        samples = [sample[:3] for sample in samples]
    chunk = view(samples) if by_whom == "readers" else None
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, **_: (len(batch), batch[0]))
    got = cut_batch([(chunk or view(samples), 0, 3)], None)
    assert bits(got) == bits(default_collate(samples))


def test_ragged_samples_come_one_by_one():
    samples = [torch.arange(i) for i in range(1, 4)]
    chunk = view(samples)
    assert bits(cut_batch([(chunk, 1, 2)], None)) == bits(samples[1][None])
    with pytest.raises(
        RuntimeError, match=r"equal size.*give SharedPipeline\(collate_fn=\.\.\.\)"
    ):
        cut_batch([(chunk, 0, 2)], None)
    unlike = view([{"image": 1, "box": 2}, {"image": 3}])
    with pytest.raises(KeyError, match=r"'box'.*give SharedPipeline\(collate_fn=\.\.\.\)"):
        cut_batch([(unlike, 0, 2)], None)


@pytest.mark.parametrize("last", [4.5, "4", np.float32(4)])
def test_samples_that_are_alike_and_others_make_one_batch(last):
    samples = [
        {"n": n, "a": np.arange(3), "s": ("x", b"y"), "f": np.float32(1)} for n in (1, 2, 3)
    ]
    parts = [(view(samples[:2]), 0, 2), (view([samples[2], {**samples[2], "f": last}]), 0, 1)]
    assert bits(cut_batch(parts, None)) == bits(default_collate(samples))


def test_read_only_arrays_are_stored_without_warnings():
    array = np.arange(6.0)
    array.flags.writeable = False
    assert cut_batch([(view([array] * 2), 0, 2)], None).tolist() == [[*range(6)]] * 2
    assert isinstance(view([array, 1]).samples(0, 2)[0], np.ndarray)
