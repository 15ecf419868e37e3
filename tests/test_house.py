"""The rules of the house: who may import what, no cycles, and what tests know."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, TypeGuard

import pytest

import optuna_fleet
from optuna_fleet import alloc, virtual_workers

ROOT = Path(optuna_fleet.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """Every name that a module imports, wherever in the file, but for type checking."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def at_import_time(path: Path) -> set[str]:
    """What importing the module imports of the package: top-level statements only."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.add(node.module)
            found.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in MODULES
            )
    return found


ROOMS = {
    "torch": "trainer preflight pipeline images checkpoints integrations virtual_workers",
    "mip": "alloc",
    "optuna": "sampler_bridge trainer preflight executor.fleet_executor visualization checkpoints "
    "integrations",
}


@pytest.mark.parametrize("library", ROOMS)
def test_a_library_is_imported_only_in_its_rooms(library: str) -> None:
    rooms = tuple(f"optuna_fleet.{room}" for room in ROOMS[library].split())
    users = [m for m in MODULES if any(n.split(".")[0] == library for n in imported(MODULES[m]))]
    assert [module for module in users if not module.startswith(rooms)] == []


DECIDING = (
    "alloc replay executor.deciding virtual_workers.wsp virtual_workers.partition "
    "virtual_workers.layouts"
)
DOING = "torch socket subprocess threading time os selectors multiprocessing"


@pytest.mark.parametrize("room", DECIDING.split())
def test_what_decides_does_no_io(room: str) -> None:
    within = {m for m in MODULES if m.startswith(f"optuna_fleet.{room}")}
    assert within
    for module in within - {"optuna_fleet.alloc.isolation"}:
        assert not imported(MODULES[module]).intersection(DOING.split()), module


def test_virtual_workers_have_one_seam() -> None:
    """What others may have of them is what the folder's `__init__` names."""
    room = "optuna_fleet.virtual_workers"
    others = [path for module, path in MODULES.items() if not module.startswith(room)]
    used = {name for path in others for name in imported(path) if name.startswith(room)}
    assert used
    assert used <= {room, *(f"{room}.{name}" for name in virtual_workers.__all__)}


def test_one_module_names_accelerators() -> None:
    """Docstrings may, where a user is told what to write."""
    names = ("cuda", "nccl", "nvidia")
    for module in MODULES.keys() - {"optuna_fleet.accelerator"}:
        told = [text for text in said_by(MODULES[module]) if any(n in text.lower() for n in names)]
        assert told == [], module


def said_by(path: Path) -> Iterator[str]:
    """All names and strings of a module but its docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    for node in nodes:
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)
        yield from (
            str(vars(node)[at]) for at in ("id", "attr", "name", "arg") if at in vars(node)
        )


def test_one_module_touches_the_store_of_checkpoints() -> None:
    """Who imports something of theirs has it touch no files, but by way of the store."""
    room = "optuna_fleet.checkpoints"
    touching = "flock glob iterdir listdir mkdir mkdtemp mkstemp read_bytes read_text rmtree "
    touching += "scandir stat touch unlink write_bytes"
    users = {m for m, path in MODULES.items() if any(n.startswith(room) for n in imported(path))}
    users |= {module for module in MODULES if module.startswith(room)}
    assert f"{room}.store" in users
    for module in users - {f"{room}.store"}:
        calls = (node for node in ast.walk(ast.parse(MODULES[module].read_text())))
        names = {node.func.attr for node in calls if is_method_call(node)}
        assert not names.intersection(touching.split()), module


def is_method_call(node: ast.AST) -> TypeGuard[Any]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def test_the_pipeline_knows_nothing_of_images() -> None:
    within = [path for module, path in MODULES.items() if module.startswith("optuna_fleet.pipel")]
    used = {name for path in within for name in imported(path)}
    assert within
    assert {name for name in used if name.startswith("optuna_fleet.images")} == set()


def test_no_import_cycles() -> None:
    # A package's __init__ that only re-exports is entered by its own modules too; leave it out.
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    graph = {
        module: at_import_time(path) - packages
        for module, path in MODULES.items()
        if module not in packages
    }
    assert list(TopologicalSorter(graph).static_order())


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.name for path in MODULES.values())
    several = {name for name, number in names.items() if number > 1}
    assert several <= {"__init__.py", "__main__.py"}


def test_the_driver_does_not_import_torch() -> None:
    code = "import sys, optuna_fleet; assert not {'torch', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_module_names_what_is_private_to_optuna() -> None:
    """Attributes can't be told apart from ours; what is imported can."""
    for module in MODULES.keys() - {"optuna_fleet.sampler_bridge.compat"}:
        names = {name for name in imported(MODULES[module]) if name.startswith("optuna.")}
        private = {name for name in names if any(is_private(part) for part in name.split("."))}
        assert private == set(), module


PUBLIC = ("policies", "exceptions", "visualization", "integrations", "replay", "cli")
NEUTRAL = tuple(
    f"tests.{name}" for name in ("behaviour", "leftovers", "nursery", "storage_servers", "waiting")
)
"""What tests of behaviour may import of the others; the pipeline's have harnesses beside them."""


@pytest.mark.parametrize("folder", ["tests/behaviour", "tests/pipeline/behaviour"])
def test_behaviour_is_tested_by_public_names(folder: str) -> None:
    """Only so do these tests survive what is rebuilt; their harness may know internals."""
    paths = set((ROOT.parent / folder).glob("*.py"))
    paths -= {path for path in paths if path.name == "harness.py"}
    assert len(paths) > 5
    for path in paths:
        for name in imported(path):
            root = name.split(".")[0]
            assert is_public(name), (path.name, name)
            is_neutral = name == "tests" or name.startswith(NEUTRAL)
            assert root != "tests" or is_neutral, (path.name, name)
        assert private_names(path) == set(), path.name


def is_public(name: str) -> bool:
    """Or of another package."""
    packages = (optuna_fleet, alloc)
    allowed = {f"{p.__name__}.{name}" for p in packages for name in ("", *p.__all__)}
    rooms = tuple(f"optuna_fleet.{room}" for room in PUBLIC)
    is_ours = name.split(".")[0] == "optuna_fleet"
    return not is_ours or f"{name}." in allowed or name in allowed or name.startswith(rooms)


def test_most_tests_are_of_behaviour() -> None:
    """Those that know internals, but for pure decisions, are in the way of who rebuilds these."""
    paths = (ROOT.parent / "tests").rglob("test_*.py")
    others = [path for path in paths if path.parent.name not in ("unit", "alloc")]
    found = Counter(is_so for path in others for is_so in are_of_behaviour(path))
    assert found[True] > found[False], found


def are_of_behaviour(path: Path) -> Iterator[bool]:
    """Of each test of a module: whether it gets by with public names and with what tests share."""
    tree = ast.parse(path.read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    aliases = [(f"{node.module}.{alias.name}", alias) for node in imports for alias in node.names]
    internals = {alias.asname or alias.name for name, alias in aliases if not is_public(name)}
    uses = {n.name: used_by(n) for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for test in uses:
        if test.startswith("test_"):
            names, left = set[str](), {test}
            while left:
                names |= left
                left = set[str]().union(*(uses.get(name, set()) for name in left)) - names
            yield not (names & internals or any(map(is_private, names)))


def used_by(node: ast.AST) -> set[str]:
    """Names in a definition, fixtures too, and private attributes of others."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    others = (each.attr for each in attributes if getattr(each.value, "id", "") != "self")
    return {name for name in found if not is_private(name)} | set(filter(is_private, others))


def test_unit_tests_are_of_pure_decisions() -> None:
    """They start nothing, train nothing and patch nothing: so they are quick, and stay true."""
    doing = {"torch", "optuna", "subprocess", "multiprocessing", "socket", "unittest"}
    paths = set((ROOT.parent / "tests/unit").glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        names = imported(path)
        assert not {name.split(".")[0] for name in names} & doing, path.name
        assert "optuna_fleet.FleetExecutor" not in names, path.name
        others = {name for name in names if name.startswith("tests.")}
        assert {name for name in others if not name.startswith("tests.unit")} == set(), path.name
        arguments = {
            n.arg for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.arg)
        }
        assert not arguments & {"monkeypatch", "fleet"}, path.name


def private_names(path: Path) -> set[str]:
    """What begins with one underscore and is somebody else's."""
    found = {name for name in imported(path) if any(is_private(p) for p in name.split("."))}
    for node in ast.walk(ast.parse(path.read_text())):
        is_own = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own:
            found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"
