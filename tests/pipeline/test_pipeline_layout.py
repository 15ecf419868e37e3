import collections
import datetime
import gc
import os
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms.functional import pil_to_tensor

from optuna_fleet.pipeline.chunk_view import ChunkView, cut_batch
from optuna_fleet.pipeline.columns import without_images
from optuna_fleet.pipeline.layout import DenseHeader, ObjectHeader, write_chunk
from optuna_fleet.pipeline.structure import map_leaves

Point = collections.namedtuple("Point", "x y")


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


def view(samples: list[Any], *, collated_by_user: bool = False) -> ChunkView:
    return ChunkView(write_chunk(samples, collated_by_user=collated_by_user))


SAMPLES = {
    "tensor": lambda i: torch.full((3, 2), float(i)),
    "bfloat16": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "transposed": lambda i: torch.arange(6).view(2, 3).t() + i,
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
    assert_same(cut_batch([(one, 0, 6)], None), default_collate(samples[:6]))
    assert_same(cut_batch([(one, 2, 3)], None), default_collate(samples[2:3]))
    straddling = cut_batch([(one, 1, 6), (other, 0, 3)], None)
    assert_same(straddling, default_collate(samples[1:9]))


def test_usual_samples_are_stored_densely():
    for name in set(SAMPLES) - {"ordered dict", "key order"}:
        samples = [SAMPLES[name](i) for i in range(4)]
        assert isinstance(view(samples).header, DenseHeader), name


def test_dense_batch_is_not_copied():
    chunk = view([torch.full((16,), float(i)) for i in range(8)])
    one = cut_batch([(chunk, 4, 8)], None)
    one.zero_()
    assert not cut_batch([(chunk, 4, 8)], None).any()


def test_batches_are_aligned_wherever_they_begin():
    chunk = view([(torch.full((3,), float(i)), i) for i in range(8)])
    for start in range(7):
        for tensor in cut_batch([(chunk, start, start + 2)], None):
            assert tensor.data_ptr() % 64 == 0


def test_no_value_leaks_between_mappings_of_one_file():
    fd = write_chunk([torch.zeros(4096)] * 4, collated_by_user=False)
    first, second = ChunkView(os.dup(fd)), ChunkView(os.dup(fd))
    cut_batch([(first, 0, 4)], None).add_(1)
    assert not cut_batch([(second, 0, 4)], None).any()
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_kept_batch_outlives_its_chunk():
    batch = cut_batch([(view([torch.arange(1000)] * 4), 0, 4)], None)
    gc.collect()
    assert torch.equal(batch, torch.arange(1000).expand(4, -1))


def test_ragged_samples_come_one_by_one():
    samples = [torch.arange(i) for i in range(1, 4)]
    chunk = view(samples)
    assert isinstance(chunk.header, ObjectHeader)
    assert_same(cut_batch([(chunk, 1, 2)], None), samples[1][None])
    with pytest.raises(RuntimeError, match="equal size"):
        cut_batch([(chunk, 0, 2)], None)


def test_dense_and_object_chunks_make_one_batch():
    samples = [{"n": n, "a": np.arange(3), "s": "x", "f": np.float32(n)} for n in (1, 2, 3, 4.5)]
    parts = [(view(samples[:2]), 0, 2), (view(samples[2:]), 0, 2)]
    assert_same(cut_batch(parts, None), default_collate(samples))


def test_collate_fn_gets_samples_as_they_were():
    samples = [(Point(i, "a"), {i}, datetime.date(2020, 1, i + 1), None) for i in range(4)]
    chunk = view(samples, collated_by_user=True)
    assert cut_batch([(chunk, 1, 4)], lambda batch: batch) == samples[1:]


def test_classes_of_main_are_pickled_by_value():
    local = type("Local", (), {"__module__": "__main__"})
    item = local()
    item.value = 3
    (got,) = cut_batch([(view([item], collated_by_user=True), 0, 1)], lambda batch: batch)
    assert got.value == 3


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "1", "P"])
def test_images_become_uint8_tensors(mode):
    image = Image.fromarray(np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)).convert(mode)
    samples = [map_leaves((image, i), without_images) for i in range(3)]
    pixels = cut_batch([(view(samples), 0, 3)], None)[0]
    assert_same(pixels, torch.stack([pil_to_tensor(image)] * 3))


def test_read_only_arrays_are_stored_without_warnings():
    array = np.arange(6.0)
    array.flags.writeable = False
    assert_same(
        cut_batch([(view([array] * 2), 0, 2)], None), torch.arange(6.0).double().expand(2, 6)
    )
    array = np.arange(6.0)
    array.flags.writeable = False
    assert isinstance(view([array, 1]).samples(0, 2)[0], np.ndarray)
