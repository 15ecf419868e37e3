"""How the user's objects are packed to be sent to another process.

They are packed by themselves within a message: one that can't be unpacked by the receiver fails
its own call or trial, and not the channel.
"""

from __future__ import annotations

import functools
import io
import pickle
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from optuna_fleet.exceptions import RemoteObjectiveError, shown


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles all that is sent of the user's: cloudpickle, and what that can't do.

    That can't pickle modules that are more than a plain one (``torch.backends.cudnn``,
    ``torch.ops``), functions that pybind11 made (``torch._C``), cached properties (for their lock)
    and functions that torch compiles (for what torch keeps with them); it refers to functions with
    a cache by name, as if their script could be imported; and from 3.1.3 on it drops the names of
    files, which tracebacks, warnings and `inspect.getsource` (so `torch.jit.script`) need. And it
    sends all of a text file that is open for reading, as one in memory.
    """

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler.reducer_override`."""
        if isinstance(obj, types.ModuleType):
            return _module_reduction(obj)
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError("cannot pickle an open file")
        if isinstance(obj, types.CodeType):
            make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if p == "<dynamic-code>" else p for p in parts)
        if isinstance(obj, _CACHED):
            return _cached_reduction(obj)
        if type(obj) is functools.cached_property:
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj).__module__ == "torch._ops":  # torch.ops.aten.add, torch.ops.aten.add.Tensor
            return _reference(f"torch.ops.{obj}", obj) or NotImplemented
        if isinstance(obj, types.BuiltinFunctionType) and _is_of_capsule(obj):
            return _reference(f"{obj.__module__}.{obj.__name__}", obj) or NotImplemented
        reduction = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and reduction is not NotImplemented:
            return _function_reduction(obj, reduction)
        return reduction


def _is_of_capsule(function: Any) -> bool:
    return type(function.__self__).__name__ == "PyCapsule"


def _function_reduction(function: types.FunctionType, reduction: Any) -> Any:
    """As cloudpickle does it, but what torch.compile made of one has torch's own globals again."""
    if not function.__globals__.get("__name__", "").startswith("torch._dynamo."):
        return reduction
    make, (code, _, *others), (state, slots), *rest = reduction
    its_globals = _Globals(sys.modules[function.__globals__["__name__"]])
    return make, (code, its_globals, *others), (state, {**slots, "__globals__": {}}), *rest


class _Globals:
    """Comes out of a pickle as the globals of a module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return vars, (self._module,)


_CACHED = type(functools.lru_cache(len))


def _cached_reduction(function: Any) -> Any:
    name = f"{function.__module__}.{function.__qualname__}"
    if function.__module__ != "__main__" and found_by_name(name) is function:
        return NotImplemented  # by name
    return _cached, (function.cache_parameters(), function.__wrapped__)


def _cached(parameters: dict[str, Any], function: Any) -> Any:
    return functools.lru_cache(**parameters)(function)


def _module_reduction(module: types.ModuleType) -> Any:
    is_plain = type(module) is types.ModuleType
    if is_plain and module.__name__ in sys.modules:
        return NotImplemented  # by name unless the user has told cloudpickle otherwise
    by_value = cloudpickle.Pickler.dispatch_table[types.ModuleType]
    return _reference(module.__name__, module) or by_value(module)


def _reference(name: str, obj: Any) -> Any:
    """How pickle finds an object by its dotted name; None if it is not there."""
    return (pkgutil.resolve_name, (name,)) if found_by_name(name) is obj else None


def found_by_name(name: str) -> Any:
    """Return the module, or what is an attribute of one, that has this dotted name, or None."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, attribute = name.rpartition(".")
    return getattr(found_by_name(parent), attribute, None) if parent else None


def pack(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Return `value` as bytes; classes of ``__main__`` are sent by value.

    The callback is as for `pickle.dumps`, of protocol 5.
    """
    buffer = io.BytesIO()
    Pickler(buffer, buffer_callback=buffer_callback).dump(value)
    return buffer.getvalue()


def plain(value: Any) -> Any:
    """Return the number that a scalar tensor or array holds; lists and tuples item by item.

    So that the driver need not import torch to read a value.
    """
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    is_scalar = getattr(value, "ndim", None) == 0 or (is_tensor(value) and value.numel() == 1)
    return value.item() if is_scalar else value


def is_primitive(value: Any) -> bool:
    """Whether Optuna stores it as it is in any storage, and a copy is as good as the original."""
    return value is None or isinstance(value, (bool, int, float, str))


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor; does not import torch."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def pack_objective(objective: Any, names: Mapping[int, str]) -> bytes:
    """Return an objective as bytes; of objects whose `id` is in `names`, only that is sent."""
    buffer = io.BytesIO()
    ObjectivePickler(buffer, names).dump(objective)
    return buffer.getvalue()


def unpack_objective(data: bytes, resolve: Callable[[str], Any]) -> Any:
    """Return an objective; `resolve` gives the objects of which only a name was sent.

    Its script becomes this process's ``__main__``.
    """

    class ObjectiveUnpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return resolve(name)

    objective = ObjectiveUnpickler(io.BytesIO(data)).load()
    _become_main(objective)
    return objective


def _become_main(objective: Any) -> None:
    """Have pickle, and processes that the objective spawns, find its script's names."""
    function = objective
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__globals__"):  # an object that can be called
        function = getattr(function, "__call__", None)  # noqa: B004
    names = getattr(function, "__globals__", {})
    if names.get("__name__") == "__main__":
        main = types.ModuleType("__main__")
        vars(main).update(names)
        # The second is what spawned processes call it.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main


class ObjectivePickler(Pickler):
    """Writes names for some objects: see `pack_objective`."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        """See `pickle.Pickler.persistent_id`."""
        return self._names.get(id(obj))


def unpack(data: bytes) -> Any:
    """Return what was packed."""
    return pickle.loads(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception on its way to another process.

    Attributes:
        packed: The exception itself; empty if neither it nor its parts can be pickled.
        description: Its type and message.
        traceback: Its traceback where it was raised.
    """

    packed: bytes
    description: str
    traceback: str


def pack_error(error: BaseException) -> Raised:
    """Pack an exception, with its type if that can be unpickled."""
    return Raised(
        packed=_packed(error) or _packed(_Parts(error)) or b"",
        description=_described(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__qualname__}: {error}"
    except Exception as trouble:
        return f"{type(error).__qualname__} (whose text can't be had: {shown(trouble)})"


def _packed(value: Any) -> bytes | None:
    """Its bytes, if it can be pickled and unpickled."""
    try:
        packed = pack(value)
        unpack(packed)
    except Exception:
        return None
    return packed


class _Parts:
    """An exception whose own way to be pickled fails; unpickled, it is that exception.

    Mostly its `__init__` takes other arguments than it gives to `Exception`. Or it holds an object
    that can't be sent, which is left out.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        error = self._error
        attributes = {k: v for k, v in vars(error).items() if _packed(v) is not None}
        arguments = tuple(a if _packed(a) is not None else shown(a) for a in error.args)
        return _assembled, (type(error), arguments, attributes)


def _assembled(
    kind: type[BaseException], arguments: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(attributes)
    str(error)  # or it would fail in the log of whoever gets it
    return error


def unpack_error(raised: Raised) -> BaseException:
    """Return the exception, or a description of it where its own type can't be unpickled."""
    try:
        error = unpack(raised.packed)
    except Exception:
        return RemoteObjectiveError(raised.description)
    return error if isinstance(error, BaseException) else RemoteObjectiveError(raised.description)
