"""What a user gives to a ``SharedPipeline``, told apart and checked: data sets and options.

What can't work raises a ``FleetConfigError``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import Any

from optuna_fleet.arguments import did_you_mean
from optuna_fleet.exceptions import FleetConfigError

_NO_DATA = (type(None), bool, int, float, str, bytes, PathLike)
_OF_A_LOADER = {
    "batch_size": "it is given to trial.batches(name, batch_size=...)",
    "drop_last": "it is given to trial.batches(name, drop_last=True)",
    "shuffle": "`shuffled` takes the names of the data sets that get a new order in every epoch",
    "num_workers": "`num_preprocessors` is the most there may be",
    "batch_sampler": "each trial has a batch size of its own; `sampler` takes a sampler of single "
    "indices, whose order all trials share",
    "worker_init_fn": "each sample is seeded, from `seed`; what each process needs for itself a "
    "data set sets up in __setstate__, which is called once in each of them",
    "weights": "`sampler=torch.utils.data.WeightedRandomSampler(weights, num_samples)` draws by "
    "them",
}


def length_of(name: str, value: Any, names: Collection[str], options: Collection[str]) -> int:
    """Returns the length of what was given under the name of a data set; 0 of an unknown one.

    It is one of the ``names`` of all data sets, and none of the ``options``.
    """
    is_option = name in _OF_A_LOADER or _has_names(value, names)  # one that is misspelt
    if is_option or not (_is_map_style(value) or is_stream(value)):
        raise FleetConfigError(_complaint(name, value, options))
    try:
        length = len(value)
    except TypeError:
        return 0
    check_length(name, length)
    return int(length)


def _has_names(value: Any, names: Collection[str]) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(isinstance(each, str) and each in names for each in value)


def check_length(name: str, length: int) -> None:
    """Raises FleetConfigError if a data set is empty."""
    if not length:
        raise FleetConfigError(
            f"Data set {name!r} is empty, but must have at least one sample. "
            "Check the path or the filter it was built with."
        )


def is_stream(value: Any) -> bool:
    """Returns whether a data set is read in order: it is torch's ``IterableDataset``."""
    data = sys.modules.get("torch.utils.data")
    is_one = data is not None and isinstance(value, data.IterableDataset)
    return is_one and not _is_map_style(value)


def of_loaders(given: Mapping[str, Any], options: Collection[str]) -> dict[str, Any]:
    """Returns the arguments of a ``SharedPipeline`` that DataLoaders stand for.

    What was ``given`` of the ``options`` goes first.
    """
    loaders = {name: value for name, value in given.items() if name not in options}
    if not loaders:
        raise FleetConfigError(
            "from_dataloader() needs at least one DataLoader, by name: "
            "SharedPipeline.from_dataloader(train=loader)."
        )
    shuffled: list[str] = []
    drawn: dict[str, Any] = {}
    collates: dict[str, Any] = {}
    for name, loader in loaders.items():
        _check_loader(name, loader, options)
        data = sys.modules["torch.utils.data"]
        sampler = loader.sampler
        if is_stream(loader.dataset):
            shuffled += [] if _FIXED.match(name) else [name]
        elif type(sampler) is not data.SequentialSampler:
            shuffled.append(name)
            num_all = len(loader.dataset) if type(sampler) is data.RandomSampler else None
            if num_all is None or sampler.replacement or sampler.num_samples != num_all:
                drawn[name] = sampler
        if loader.collate_fn is not data.default_collate:
            collates[name] = loader.collate_fn
    datasets = {name: loader.dataset for name, loader in loaders.items()}
    told = {"shuffled": shuffled, "sampler": drawn, "collate_fn": collates}
    return {**told, **given, **datasets}


def _check_loader(name: str, loader: Any, options: Collection[str]) -> None:
    if not _is_loader(loader):
        hint = did_you_mean(name, options)
        raise FleetConfigError(
            f"`{name}` is of type {type(loader).__name__}, but from_dataloader() takes "
            f"DataLoaders by name, and options of a SharedPipeline{hint or '.'}"
        )
    batches = sys.modules["torch.utils.data"].BatchSampler
    for what, is_there in (
        ("batch_sampler", type(loader.batch_sampler) is not batches),  # or batch_size=None
        ("worker_init_fn", loader.worker_init_fn is not None),
    ):
        if is_there:
            raise FleetConfigError(
                f"The DataLoader of {name!r} has a `{what}` of its own, which can't be shared: "
                f"{_OF_A_LOADER[what]}."
            )


def _is_loader(value: Any) -> bool:
    return any(kind.__name__ == "DataLoader" for kind in type(value).__mro__)


def _complaint(name: str, value: Any, options: Collection[str]) -> str:
    elsewhere = _OF_A_LOADER.get(name)
    hint = f": {elsewhere}." if elsewhere else did_you_mean(name, options)
    if _is_loader(value):
        hint = f": give SharedPipeline.from_dataloader({name}=loader)."
    needed = (
        "map-style data sets, with len(dataset) and dataset[index], or streams, each a "
        "torch.utils.data.IterableDataset"
    )
    if hint or callable(value) or isinstance(value, _NO_DATA):
        return (
            f"`{name}` is no option of a SharedPipeline{hint or '.'} Its other keywords are "
            f"{needed}, and {value!r:.60} is none."
        )
    return f"Data set {name!r} is of type {type(value).__name__}, but must be one of {needed}."


def _is_map_style(value: Any) -> bool:
    if isinstance(value, (str, bytes, type, Mapping)) or not hasattr(value, "__len__"):
        return False
    # What torch's Dataset has only raises, and an IterableDataset with a length inherits it.
    data = sys.modules.get("torch.utils.data")  # not loaded: no data set is of these classes
    stub = getattr(getattr(data, "Dataset", None), "__getitem__", None)
    return getattr(type(value), "__getitem__", None) not in (None, stub)


def by_name(
    argument: str, given: Any, names: Collection[str], default: Collection[str]
) -> dict[str, Callable[..., Any]]:
    """Returns one callable per name, where one alone is for all of ``default``."""
    found = _named(argument, given, names, default)
    for name, function in found.items():
        if not callable(function):
            raise FleetConfigError(
                f"The {argument} of data set {name!r} is {function!r}, but must be callable."
            )
    return found


def sampler_by_name(
    given: Any, datasets: Mapping[str, Any], shuffled: Collection[str]
) -> dict[str, Any]:
    """Returns a sampler per name; one alone is for the shuffled data set."""
    if given is not None and not isinstance(given, Mapping) and len(shuffled) != 1:
        raise FleetConfigError(
            f"For which data set is `sampler`? {len(shuffled)} of them are shuffled. Say "
            f"it by name: sampler={{{sorted(shuffled or datasets)[0]!r}: ...}}."
        )
    found = _named("sampler", given, datasets, shuffled)
    for name in found:
        if is_stream(datasets[name]):
            raise FleetConfigError(
                f"Data set {name!r} is a stream, which has an order of its own: leave out its "
                "`sampler`, and shuffle in the stream."
            )
    return found


def _named(
    argument: str, given: Any, names: Collection[str], default: Collection[str]
) -> dict[str, Any]:
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(default, given)
    _check_names(argument, found, names)
    return found


def num_drawn(name: str, sampler: Any) -> int:
    """Returns how many samples a sampler draws in an epoch."""
    whose = f"The `sampler` of data set {name!r} is a {type(sampler).__name__}"
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        raise FleetConfigError(
            f"{whose}, which draws one rank's share. Leave it out: trial.batches divides each "
            "batch among the trial's devices, however many these are at the time."
        )
    try:
        number = len(sampler)
        is_sampler = hasattr(sampler, "__iter__") and not isinstance(sampler, (str, bytes))
    except TypeError:
        is_sampler = False
    if not is_sampler:
        raise FleetConfigError(
            f"{whose}, but must be a torch.utils.data.Sampler, or another iterable of indices, "
            "with a len(): the samples of an epoch. Of one that never ends, say how many of its "
            "indices are an epoch."
        )
    if not number:
        raise FleetConfigError(f"{whose} with a len() of 0, but must draw at least one sample.")
    return number


def batched_among(given: Any, datasets: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the data sets that are read many samples at once."""
    if isinstance(given, bool):
        given = datasets if given else ()
    found = _names_in("batched", given, datasets, " True for all, or")
    for name in sorted(found):
        if not callable(getattr(datasets[name], "__getitems__", None)):
            raise FleetConfigError(
                f"`batched` is for data sets with a method __getitems__(indices), but {name!r} is "
                f"of type {type(datasets[name]).__name__}, which has none. Leave it out, or name "
                "those that have it: batched=['train']."
            )
    return found


_FIXED = re.compile("(val|valid|validation|test|eval|evaluation)(?![a-z])")


def shuffled_among(given: Any, names: Collection[str]) -> frozenset[str]:
    """Returns the names of the shuffled data sets."""
    if given is None:
        found = frozenset(name for name in names if name.startswith("train"))
        unclear = [name for name in names if name not in found and not _FIXED.match(name)]
        if unclear:
            raise FleetConfigError(_ask(unclear, sorted(found)))
        return found
    return _names_in("shuffled", given, names)


def _names_in(argument: str, given: Any, names: Collection[str], more: str = "") -> frozenset[str]:
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Collection):
        raise FleetConfigError(
            f"The value of `{argument}` is {given!r}, but must be{more} names of data sets, as "
            "['train']."
        )
    _check_names(argument, given, names)
    return frozenset(given)


def _ask(unclear: list[str], found: list[str]) -> str:
    return (
        f"Is data set {unclear[0]!r} for training? Its name does not tell, as train... and "
        "val..., test..., eval... do. Say which data sets get a new order and new augmentation in "
        f"every epoch: SharedPipeline(..., shuffled={[*found, *unclear]!r}), or "
        f"shuffled={found!r} where {' and '.join(map(repr, unclear))} "
        f"{'is' if len(unclear) == 1 else 'are'} to be the same in all epochs."
    )


def _check_names(argument: str, given: Collection[str], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            known = ", ".join(map(repr, names))
            raise FleetConfigError(
                f"`{argument}` names {name!r}, but the SharedPipeline's data sets are {known}."
            )
