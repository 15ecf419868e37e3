"""What is sent of a user's script arrives; what can't be sent is named as the script names it."""

import functools
import inspect
import runpy
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch._dynamo.config
import torchvision  # noqa: F401  torch.ops.torchvision

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.fleet_runner import _packed
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.wire.packing import pack, unpack
from optuna_fleet.wire.unpicklable import explained
from tests.scripted import script


def sent(value: Any) -> Any:
    return unpack(pack(value))


@pytest.mark.parametrize(
    "thing",
    [
        torch.backends.cudnn,
        torch.backends.mps,
        torch.ops,
        torch.ops.torchvision,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch._C._profiler,
        torch._dynamo.config,
        torch.utils.data.Dataset,
    ],
)
def test_what_an_objective_mentions_is_that_of_the_process_it_comes_to(thing: Any) -> None:
    assert sent(thing) is thing
    objective = script("def objective(trial): return thing", thing=thing)["objective"]
    assert sent(objective)(None) is thing


def test_a_module_that_cannot_be_imported_travels_by_value() -> None:
    class Lazy(types.ModuleType):
        pass

    for module in types.ModuleType("made_up"), Lazy("made_up"), Lazy("not.there"):
        module.rate = 0.1  # type: ignore[attr-defined]
        arrived = sent(module)
        assert arrived is not module
        assert (arrived.__name__, arrived.rate) == (module.__name__, 0.1)


CACHED = """
import functools, typing

@functools.lru_cache(maxsize=5)
def double(x): return 2 * x

class Folder:
    @functools.cached_property
    def size(self): return double(3)

def objective(trial): return double(1), Folder().size, double.cache_parameters()["maxsize"]
"""


def test_functions_and_properties_of_the_script_may_be_cached() -> None:
    over_there = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(None))"
    packed = pack(script(CACHED)["objective"])
    answer = subprocess.run(
        [sys.executable, "-c", over_there], input=packed, check=True, capture_output=True
    )
    assert answer.stdout.decode().strip() == "(2, 6, 5)"


@functools.cache
def importable() -> int:
    return 1


def test_a_cached_function_that_can_be_imported_is_the_one_over_there() -> None:
    assert sent(importable) is importable


COMPILED = """
import functools, torch
shift = 2

@torch.compile(backend="eager")
def shifted(x): return x + shift

@functools.wraps(shifted)
def doubled(x): return 2 * shifted(x)

def objective(trial): return doubled(torch.zeros(1)).item()
"""


def test_functions_of_the_script_may_be_compiled() -> None:
    assert sent(script(COMPILED)["objective"])(None) == 4


def test_the_code_of_a_script_still_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.py"
    path.write_text("def objective(trial):\n    return lambda: trial\n")
    objective = sent(runpy.run_path(str(path), run_name="__main__")["objective"])
    assert inspect.getsource(objective) == path.read_text()
    assert objective(None).__code__.co_filename == str(path)


# -- what can't be sent ---------------------------------------------------------------------------

SCRIPT = """
import functools

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
def use_hidden(trial): return hidden
def use_nested(trial):
    def inner(): return lock
    return inner()
hidden = [Hidden()]

def around(lock):
    def inner(trial): return lock
    return inner
use_closure = around(lock)

def use_attribute(trial): return 0.0
use_attribute.log = lock

use_call = Objective()
use_method = Objective().run
use_partial = functools.partial(around, lock)
"""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return script(SCRIPT, lock=threading.Lock())


def words_for(value: Any) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        pack(value)
    return explained({"objective": value}, "given", caught.value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("use_global", "`lock`, which use_global() (train.py:26) uses, is of type `_thread.lock`"),
        ("use_item", "`config['log'].handle`, which use_item() (train.py:27) uses, is of type `_"),
        ("use_default", "`log`, which helper() (train.py:23) uses"),
        ("use_keyword", "`log`, which keyword() (train.py:24) uses"),
        ("use_class", "`Seen.lock`, which use_class() (train.py:30) uses"),
        ("use_generator", "is of type `generator`; it can't be pickled (TypeError: "),
        ("use_hidden", "`hidden[0].shown`, which use_hidden() (train.py:32) uses"),
        ("use_nested", "`lock`, which use_nested() (train.py:33) uses"),
        ("use_closure", "`lock`, which around.<locals>.inner() (train.py:39) uses"),
        ("use_attribute", "`log`, which use_attribute() (train.py:43) uses"),
        ("use_call", "`objective.log[0].handle`, given, is of type `_thread.lock`"),
        ("use_method", "`self.log[0].handle`, the object of the method Objective.run, is of typ"),
        ("use_partial", "`objective.args[0]`, given, is of type `_thread.lock`"),
    ],
)
def test_what_cannot_be_sent_is_named(names: dict[str, Any], objective: str, words: str) -> None:
    assert words in words_for(names[objective])


def test_the_search_ends() -> None:
    many: list[Any] = [[i] for i in range(60_000)]
    for _ in range(20_000):
        many = [many]
    assert "can't be pickled (" in words_for(many)
    for _ in range(20_000):  # or its end would be too deep for Python
        many = many.pop()


def test_the_message_says_what_to_do(names: dict[str, Any]) -> None:
    objective = names["use_global"]
    with pytest.raises(FleetConfigError, match=r"`lock`, which use_glob.*Create such a thing"):
        _packed(objective, optuna.create_study())
    with pytest.raises(FleetConfigError, match=r"`train\[0\]\.log.*handle`, given to"):
        SharedPipeline(train=[names["use_call"]]).payload()
    for argument in ("collate_fn", "prepare"):
        pipeline = SharedPipeline(train=[1, 2], **{argument: objective})
        with pytest.raises(FleetConfigError, match=r"`lock`, which use_global\(\) \(train\.py"):
            pipeline.packed().setup(1)
