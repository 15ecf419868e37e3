"""What can't be pickled is named as the user's script names it."""

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.fleet_runner import _packed
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.wire.packing import pack
from optuna_fleet.wire.unpicklable import explained, first_unpicklable, variable
from tests.scripted import script

SCRIPT = """
class Log:
    def __init__(self): self.handle = lock

class Seen:
    lock = lock
    def look(self): pass

class Hidden:
    def __getstate__(self): return {"shown": lock}

class Objective:
    def __init__(self): self.log = [Log()]
    def __call__(self, trial): return 0.0
    def run(self, trial): return 0.0

config = {"lr": 0.1, "log": Log()}
config["itself"] = config
numbers = (i for i in range(3))

def helper(x, log=lock, *, most=3): return x
def keyword(x, *, log=lock): return x

def use_global(trial): return lock
def use_item(trial): return config["lr"]
def use_default(trial): return helper(1)
def use_keyword(trial): return keyword(1)
def use_class(trial): return Seen()
def use_generator(trial): return next(numbers)
def use_hidden(trial): return [hidden]
def use_nested(trial):
    def inner(): return lock
    return inner()
hidden = Hidden()

def around(lock):
    def inner(trial): return lock
    return inner
use_closure = around(lock)

def use_attribute(trial): return 0.0
use_attribute.log = lock

use_call = Objective()
use_method = Objective().run
use_lambda = lambda trial: lock
"""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return script(SCRIPT, lock=threading.Lock())


def words_for(value: Any, name: str = "objective") -> str:
    with pytest.raises(Exception, match=r".") as caught:
        pack(value)
    return explained([variable(name, value, "given")], caught.value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (
            "use_global",
            "`lock`, a global variable of train.py that use_global() (train.py:24) use",
        ),
        ("use_item", "`config['log'].handle` in it is of type `_thread.lock`"),
        ("use_item", "`config`, a global variable of train.py that use_item() (train.py:25) uses"),
        ("use_default", "`log`, the default of an argument of helper() (train.py:21), is of type"),
        ("use_keyword", "`log`, the default of an argument of keyword() (train.py:22), is of"),
        ("use_class", "`Seen.lock` in it is of type `_thread.lock`"),
        ("use_generator", "uses, is of type `generator`, which can't be pickled (TypeError: "),
        ("use_hidden", "`hidden.shown` in it is of type `_thread.lock`"),
        ("use_nested", "`lock`, a global variable of train.py that use_nested() (train.py:31)"),
        ("use_closure", "`lock`, a variable of the function around around.<locals>.inner() (trai"),
        ("use_attribute", "`objective.log` in it is of type `_thread.lock`"),
        ("use_call", "`objective.log[0].handle` in it is of type `_thread.lock`"),
        (
            "use_method",
            "`self`, the object of the method Objective.run() (train.py:15), is of typ",
        ),
        ("use_method", "`self.log[0].handle` in it is of type `_thread.lock`"),
        ("use_lambda", "`lock`, a global variable of train.py that <lambda>() (train.py:46) uses"),
    ],
)
def test_what_cannot_be_sent_is_named(names: dict[str, Any], objective: str, words: str) -> None:
    assert words in words_for(names[objective])


def test_arguments_of_a_partial_are_named(names: dict[str, Any]) -> None:
    partial = functools.partial(names["around"], names["lock"])
    assert "`objective.args[0]` in it is of type `_thread.lock`" in words_for(partial)


def test_there_is_nothing_to_find_in_what_can_be_sent() -> None:
    objective = script("import torch\ndef objective(trial): return torch.ops, [1, {2: (3,)}]")
    part = variable("objective", objective["objective"], "given")
    assert first_unpicklable([part]) is None


def test_arrays_and_tensors_are_can_be_sent(names: dict[str, Any]) -> None:
    things = [np.zeros(9), np.zeros((3, 3))[:, 1], torch.zeros(3), names["lock"]]
    assert "`things[3]` in it is of type" in words_for(things, "things")


def test_an_endless_search_ends() -> None:
    chain: list[Any] = []
    for _ in range(20_000):
        chain = [chain]
    assert first_unpicklable([variable("chain", chain, "given")]) is None
    many = [[i] for i in range(60_000)]
    assert first_unpicklable([variable("many", [*many, threading.Lock()], "given")]) is None
    while chain:  # or its end would be too deep for Python
        chain = chain.pop()


def test_where_it_is_not_found_the_error_is_told() -> None:
    class Deep(list):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return list, ((),), None, iter(()), None

    assert "(OSError: gone)" in explained([variable("x", Deep(), "given")], OSError("gone"))


def test_the_message_says_what_to_do(names: dict[str, Any]) -> None:
    import optuna

    with pytest.raises(FleetConfigError, match=r"`lock`, a global.*Create such a thing inside"):
        _packed(names["use_global"], optuna.create_study())


class HasALock(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.locks = [threading.Lock()]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def test_the_part_of_a_data_set_is_named() -> None:
    with pytest.raises(FleetConfigError, match=r"`train\.locks\[0\]` in it is of type"):
        SharedPipeline(train=HasALock()).payload()


@pytest.mark.parametrize("argument", ["collate_fn", "prepare"])
def test_the_variable_of_a_stage_is_named(names: dict[str, Any], argument: str) -> None:
    pipeline = SharedPipeline(train=[1, 2], **{argument: names["use_global"]})
    with pytest.raises(
        FleetConfigError, match=r"`lock`, a global variable of train\.py that use_g"
    ):
        pipeline.packed().setup(1)
