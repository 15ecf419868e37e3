"""Any samples, in a chunk and back."""

import collections
import datetime
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import tv_tensors

from optuna_fleet.pipeline.chunks import layout
from optuna_fleet.pipeline.chunks.layout import ChunkView, chunk_in_memory, cut_batch

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
        return kind, *looks, layout.raw_bytes(plain).tolist()
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, value.tobytes()
    return kind, pickle.dumps(value)


def view(samples: list[Any], *, collated_by_user: bool = False) -> ChunkView:
    return ChunkView(chunk_in_memory(samples, collated_by_user=collated_by_user))


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


class Name(str):
    """A text of a class of its own."""


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
