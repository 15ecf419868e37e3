"""The code of the documentation: what a user would paste is run, all of it is Python."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
import yaml

import optuna_fleet
from optuna_fleet.alloc import AllocationProblem, Candidate, validate
from tests.fleets import Noise, small_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_PAGES = 14


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)```", page.read_text(), re.S | re.M)
    return [textwrap.dedent(block) for block in found]


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Who imports `FleetExecutor` gets one that runs the trials in this process."""

    def executor(pipeline: Any = None, **_: Any) -> Any:
        return optuna_fleet.executor.fleet_executor.FleetExecutor(pipeline, cluster="inline")

    monkeypatch.setattr(optuna_fleet, "FleetExecutor", executor)
    return executor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_code_is_python(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)


@pytest.mark.usefixtures("inline")
def test_the_quickstart_runs() -> None:
    (script,) = blocks(ROOT / "docs" / "index.md")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(script, names)
    assert len(names["study"].trials) == 8
    assert 0 <= names["study"].best_value <= 1


def build(trial: Any) -> tuple[Any, Any]:
    model = small_model()
    lr = trial.suggest_float("lr", 1e-3, 1e-1)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def num_correct(model: Any, x: Any, y: Any) -> int:
    with torch.no_grad():
        return int((model(x).argmax(1) == y).sum())


@pytest.mark.parametrize("page", ["data", "recipes"])
def test_what_becomes_of_other_code_runs(page: str, inline: Any) -> None:
    (ours,) = (b for b in blocks(ROOT / "docs" / f"{page}.md") if "(train=train_set, val=" in b)
    study = optuna.create_study(direction="maximize")
    names = {
        "SharedPipeline": optuna_fleet.SharedPipeline,
        "FleetExecutor": inline,
        "study": study,
        "train_set": Noise(41, augment=True),
        "val_set": Noise(20),
        **{used.__name__: used for used in (build, step, num_correct)},
    }
    exec(ours.replace("n_trials=100", "n_trials=2"), names)
    assert all(0 <= trial.values[0] <= 1 for trial in study.trials)
    assert len(study.trials) == 2


def test_a_policy_of_ones_own_decides() -> None:
    codes = [b for b in blocks(ROOT / "docs" / "allocation.md") if "def allocate" in b]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(codes), names)
    rates = (1.0, 1.9, 2.7, 3.4)
    trials = [Candidate(number=n, rates=rates, epochs_done=4 * n) for n in range(2)]
    problem = AllocationProblem(candidates=tuple(trials), nodes=((0, 1, 2, 3),))
    from_scratch = names["FirstCome"]().allocate(problem)
    validate(problem, from_scratch)
    assert {n: a.devices for n, a in from_scratch.assignments.items()} == {0: (0,), 1: (1,)}
    plan = names["policy"].new_allocator(0).allocate(problem)
    validate(problem, plan)
    assert {n: len(a.devices) for n, a in plan.assignments.items()} == {0: 1, 1: 3}
    assert plan.allocator == "narrow-at-first"


REFUSED = """
import optuna
from optuna_fleet import FleetConfigError, FleetExecutor

study = optuna.create_study()
try:
    study.optimize(lambda trial: 0.0, n_trials=1, executor=FleetExecutor(devices=1))
except FleetConfigError as error:
    print("refused:", error, flush=True)
"""


def test_processes_of_torchrun_share_a_pipeline_but_run_no_sweep(tmp_path: Path) -> None:
    (code,) = (b for b in blocks(ROOT / "docs" / "data.md") if "broadcast_object_list" in b)
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from contextlib import ExitStack\n"
        "from torch.utils.data import TensorDataset\n"
        "from optuna_fleet import SharedPipeline\n"
        "train_set = TensorDataset(torch.arange(50))\n"
        "seen = []\n"
        + code.replace("x, y in", "(x,) in").replace("...", "seen += x.tolist()")
        + "print('seen', *seen, flush=True)\ndist.destroy_process_group()\n"
        + REFUSED
    )
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    launcher = [sys.executable, *run, script]
    ran = subprocess.run(launcher, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("seen")]
    assert sorted(int(n) for line in lines for n in line[1:]) == sorted([*range(50)] * 3)
    refused = re.findall(r"refused: torchrun has .* as process (. of 2)", ran.stdout)
    assert sorted(refused) == ["0 of 2", "1 of 2"]


@pytest.mark.filterwarnings("ignore:Local rank information")
def test_the_objective_for_ignite_runs(inline: Any) -> None:
    (code,) = (b for b in blocks(ROOT / "docs" / "recipes.md") if "evaluator.run" in b)
    engine, metrics = map(pytest.importorskip, ("ignite.engine", "ignite.metrics"))
    names = {**vars(engine), "Accuracy": metrics.Accuracy, "F": F, "build": build}
    exec(code, names)
    study = optuna.create_study(direction="maximize")
    fleet = inline(optuna_fleet.SharedPipeline(train=Noise(41), val=Noise(20)))
    study.optimize(names["objective"], n_trials=1, executor=fleet)
    assert 0 <= study.best_value <= 1


def test_every_page_is_in_the_sites_navigation() -> None:
    assert len(PAGES) - 1 <= MOST_PAGES
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in PAGES[1:])


def test_pages_and_files_that_are_named_are_there() -> None:
    for folder in ("optuna_fleet", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"docs/(\w+\.md)", file.read_text()):
                assert (ROOT / "docs" / page).exists(), f"{file}: {page}"
    tests = re.findall(r"tests/[\w/.]+", (ROOT / ".ci" / "release").read_text())
    assert [name for name in tests if not (ROOT / name).exists()] == []
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"[`\"](\w+/[\w/]*(?:\.py)?)[`\"]", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "optuna_fleet" / name).exists()] == []


def test_the_page_for_who_changes_the_project_names_what_is_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.(?:py|md|yml))`", page)
    named += re.findall(r"\]\(([\w./]+)\)", page)
    assert len(named) > 20
    for block in re.findall(r"```bash\n(.*?)```", page, re.S):
        words = shlex.split(block, comments=True)
        tests = [word for word in words if word.startswith("tests/")]
        named += tests
        if "-k" in words:
            assert words[words.index("-k") + 1] in (ROOT / tests[-1]).read_text()
    rooms = (ROOT, ROOT / "optuna_fleet")
    assert [name for name in named if not any((room / name).exists() for room in rooms)] == []
    set_up = "python3 -m venv .venv && .venv/bin/pip install --quiet -e '.[test]'"
    assert set_up in page
    assert set_up in PAGES[0].read_text()


def test_a_public_host_and_commits_run_what_the_script_does() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert job["container"]  # as root, as the script's packages want it
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    block = re.findall(r"```bash\n(.*?)```", PAGES[0].read_text(), re.S)[1]  # .ci/run runs it
    linters = [step.strip() for step in block.split("&&")[3:]]
    assert [hook["entry"] for hook in hooks] == linters


def test_links_of_the_readme_lead_to_sections() -> None:
    links = re.findall(r"\]\(docs/(\w+\.md)#([\w-]+)\)", PAGES[0].read_text())
    assert len(links) > 10
    for page, section in links:
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.M)
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert section in slugs, (page, section)


def test_the_reference_has_all_that_the_package_offers() -> None:
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    found = [pkgutil.resolve_name(name) for name in named]  # a module that moved is an error
    modules = {it.__name__ for it in found if inspect.ismodule(it)}
    for name in optuna_fleet.__all__:
        it = getattr(optuna_fleet, name)
        assert it in found or it.__module__ in modules, name
