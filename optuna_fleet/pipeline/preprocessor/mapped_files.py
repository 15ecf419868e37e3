"""Arrays that are a mapped file (``np.memmap``): they travel as its name and are mapped again."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np

from optuna_fleet.exceptions import FleetError

_Array = np.ndarray[Any, Any]
_FileName = str | os.PathLike[str]

_mapped: weakref.WeakValueDictionary[_FileName, np.memmap[Any, Any]]
_mapped = weakref.WeakValueDictionary()  # so a thousand views of one file are one mapping


def reduction(array: _Array) -> Any:
    """Returns how pickle is to put an array together; None if no file could be mapped for it."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    # A memmap whose elements were computed or copied is plain memory, and what was written into
    # one of mode "c" is not in the file.
    if type(root) is not np.memmap or root.filename is None or root.mode == "c":
        return None
    if type(array) not in (np.ndarray, np.memmap) or not array.size:
        return None
    begin = root.offset + array.ctypes.data - root.ctypes.data
    place = begin, array.dtype, array.shape, array.strides
    try:
        # A relative path NumPy has made absolute.
        offset = array.offset if isinstance(array, np.memmap) else None
        arguments = root.filename, os.stat(root.filename).st_size, place, offset
        _view(*arguments)
    except (OSError, ValueError, FleetError):  # removed, cut off, strides that lead out of it
        return None
    return _view, arguments


def _view(path: _FileName, file_bytes: int, place: tuple[Any, ...], offset: int | None) -> Any:
    """What lies at this place of a file; with an ``offset``, which only describes it, a memmap."""
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
    if (file := _mapped.get(path)) is None:
        file = _mapped[path] = np.memmap(path, dtype=np.uint8, mode="r")
    begin, dtype, shape, strides = place
    view: Any = np.ndarray(shape, dtype, file, begin, strides)
    if offset is not None:
        view = view.view(np.memmap)
        view.__array_finalize__(file)  # it gets to know the file
        view.offset = offset
    return view
