"""Arrays that are a mapped file (``np.memmap``): they travel as its name and are mapped again."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from optuna_fleet.exceptions import FleetError

_Array = np.ndarray[Any, Any]


class MappedFiles:
    """The mapped files of what is being pickled."""

    def __init__(self) -> None:
        # With the arrays that mapped them, whose ids would else be those of others one day.
        self._known: dict[int, tuple[_Array, Any]] = {}

    def reduction(self, array: _Array) -> Any:
        """Returns how pickle is to put an array together that lies in a mapped file.

        A view is made from the array that mapped the file, which pickle knows again: a thousand
        views of one file are one mapping, as they are here.

        Returns:
            None if the array does not lie in a file that could be mapped again.
        """
        root = _root(array)
        if root is None or not array.size or (of_file := self._of_file(root)) is None:
            return None
        if array is root:
            return of_file
        arguments = _place(array, root)
        try:
            _view(root, *arguments)
        except ValueError:  # strides that lead out of the file
            return None
        return _view, (root, *arguments)

    def _of_file(self, root: _Array) -> Any:
        if id(root) not in self._known:
            self._known[id(root)] = root, _file_reduction(root)
        return self._known[id(root)][1]


def _root(array: _Array) -> Any:
    """The array that mapped the file; the arrays made of it are views of it."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    # A memmap whose elements were computed or copied is plain memory.
    is_mapping = type(root) is np.memmap and root.filename is not None
    return root if is_mapping and type(array) in (np.ndarray, np.memmap) else None


def _file_reduction(root: Any) -> Any:
    path, flags = root.filename, root.flags  # a relative path NumPy has made absolute
    if root.mode == "c":  # what was written into it is not in the file
        return None
    if not (flags.c_contiguous or flags.f_contiguous):  # strides set by hand
        return None
    try:
        file_bytes = os.stat(path).st_size
    except OSError:  # removed: its bytes are still here
        return None
    if file_bytes < root.offset + root.nbytes:
        return None
    order = "C" if flags.c_contiguous else "F"
    return _map, (path, file_bytes, root.dtype, root.offset, root.shape, order)


def _place(array: _Array, root: _Array) -> tuple[Any, ...]:
    """What makes this view of it."""
    offset = array.ctypes.data - root.ctypes.data
    return offset, array.dtype, array.shape, array.strides, type(array) is np.memmap


def _map(
    path: str | os.PathLike[str],
    file_bytes: int,
    dtype: np.dtype[Any],
    offset: int,
    shape: tuple[int, ...],
    order: Any,
) -> _Array:
    change = None
    try:
        if (found := os.stat(path).st_size) != file_bytes:
            change = f"has {found} bytes, but had {file_bytes} when the pipeline started"
    except OSError as error:
        change = f"can't be had any more ({error.strerror})"
    if change is not None:
        raise FleetError(
            f"The file {os.fspath(path)!r}, which a data set maps, {change}. It must stay as it "
            "is as long as the pipeline runs."
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)


def _view(
    root: _Array,
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    is_memmap: bool,
) -> _Array:
    in_order: Any = root if root.flags.c_contiguous else root.T
    view: _Array = np.ndarray(shape, dtype, in_order, offset, strides)
    if is_memmap:
        view = view.view(np.memmap)
        view.__array_finalize__(root)  # it gets to know the file
    return view
