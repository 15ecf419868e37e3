"""The data sets on their way to the preprocessors."""

import io
import mmap
import os
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from pipeline_datasets import LENGTH, mapped

from optuna_fleet.pipeline.preprocessor.payload import Payload, pack, unpack
from optuna_fleet.pipeline.preprocessor.stages import same


def travelled(value):
    """What comes out at the other end, in memory that may be written to."""
    return packed(value).load()


def packed(value):
    return Payload.written(partial(pack, value))


def nbytes(payload):
    return os.stat(payload.path).st_size


def test_nobody_can_change_the_file_that_all_read_nor_is_another_taken_for_it(tmp_path):
    payload = packed(np.arange(LENGTH))
    file = os.open(payload.path, os.O_RDWR)
    for change in (
        lambda: os.pwrite(file, b"other", 0),
        lambda: os.ftruncate(file, 0),
        lambda: os.ftruncate(file, 2 * nbytes(payload)),
        lambda: mmap.mmap(file, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(file)
    pickled = pickle.dumps(payload)
    assert (pickle.loads(pickled).load() == np.arange(LENGTH)).all()
    os.mkfifo(tmp_path / "other")
    with open(os.open(tmp_path / "other", os.O_RDONLY | os.O_NONBLOCK)) as other:
        os.dup2(other.fileno(), payload.descriptor)
        assert pickle.loads(pickled) is None


# -- mapped files ---------------------------------------------------------------------------------

VIEWS = [
    lambda array: array,
    lambda array: array[5:],
    lambda array: array[7],
    lambda array: array[3:900:7, ::-2],
    lambda array: array.T[4:],
    lambda array: array.view(np.float32)[:, 3:9],
    lambda array: array[3:4, 5:6].reshape(()),
    lambda array: np.broadcast_to(array[3], (5, 100)),
    lambda array: np.asarray(array)[3:],
]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_view_of_a_mapped_file_travels_as_its_place(tokens, order):
    for view in VIEWS if order == "C" else [*VIEWS[:5], *VIEWS[6:]]:
        array = view(mapped(tokens, "r+", shape=(1000, 100), order=order))
        assert nbytes(packed(array)) < 500
        there = travelled(array)
        assert (type(there), there.dtype, there.strides) == (
            type(array),
            array.dtype,
            array.strides,
        )
        assert np.array_equal(there, array)
        assert getattr(there, "filename", None) == getattr(array, "filename", None)
        assert not there.flags.writeable
    array = mapped(tokens)
    parts = travelled([array[i : i + 10] for i in range(500)])
    assert len({view._mmap for view in parts}) == 1


def test_what_is_no_part_of_the_file_travels_as_bytes(tokens):
    changed = mapped(tokens, "c")
    changed[77] = -1
    assert np.array_equal(travelled(changed), changed)
    assert np.array_equal(travelled(changed[70:]), changed[70:])
    array = mapped(tokens)
    assert array[77] == 77
    tokens.unlink()
    for made in (array, np.copy(array), array[[1, 2, 3]], -array):
        assert np.array_equal(travelled(made), made)


# -- what lies outside of the pickle --------------------------------------------------------------


FIXED, GRID = np.arange(1000.0), np.arange(6000.0).reshape(60, 100)
FIXED.flags.writeable = False
ARRAYS = [FIXED, GRID, GRID.T, GRID[::2, 3:], np.arange(5), np.zeros((0, 3)), np.array(7)]
ARRAYS += [np.array(["word" * 200] * 9), np.array([{}, 1], dtype=object), GRID.view(np.recarray)]
TENSOR, COMPLEX = torch.arange(6000.0).view(60, 100), torch.randn(600, dtype=torch.complex64)
TENSORS = [TENSOR, TENSOR.T, TENSOR[::2, 3:], TENSOR[7, 7], TENSOR.expand(3, -1, -1), TENSOR > 5]
TENSORS += [TENSOR.bfloat16(), COMPLEX, COMPLEX.conj(), torch.zeros(0, 3), torch.tensor(7)]
TENSORS += [torch.nn.Parameter(TENSOR.clone()), TENSOR.to_sparse()]


def test_arrays_and_tensors_are_the_same_after_the_journey():
    for array, there in zip(ARRAYS, travelled(ARRAYS), strict=True):
        assert type(there) is type(array)
        assert same(array, there)
        assert there.flags.writeable == array.flags.writeable
        assert there.flags.f_contiguous == array.flags.f_contiguous
    for tensor, there in zip(TENSORS, travelled(TENSORS), strict=True):
        assert type(there) is type(tensor)
        assert torch.equal(there.to_dense(), tensor.to_dense())
        assert (there.dtype, there.requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert tensor.is_sparse or there.stride() == tensor.stride()


def test_tensors_in_one_storage_stay_there():
    whole = torch.arange(5000.0)
    rows = [*whole.view(50, 100)]
    assert nbytes(packed(rows)) < 2 * whole.nbytes  # not the whole storage for each
    there, again, *rows = travelled([whole, whole, *rows])
    assert there is again
    there[123] = -1
    assert rows[1][23] == -1


def test_large_ones_are_views_of_what_was_sent():
    for value in (np.zeros((90, 100))[::2, 3:], torch.zeros(90, 100)[::2, 3:]):
        file = io.BytesIO()
        pack({"value": value}, file)
        there = unpack(file.getbuffer())["value"]
        sent = np.frombuffer(file.getbuffer(), dtype=np.uint8)
        assert np.shares_memory(np.asarray(there), sent)
