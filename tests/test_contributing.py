"""The page for who changes the project, and what runs the checks elsewhere, are true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
README = (ROOT / "README.md").read_text()


def test_all_files_that_the_page_names_are_there() -> None:
    named = re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.(?:py|md|yml))`", PAGE)
    named += re.findall(r"\]\(([\w./]+)\)", PAGE)
    assert len(named) > 20
    rooms = (ROOT, ROOT / "optuna_fleet")
    assert [name for name in named if not any((room / name).exists() for room in rooms)] == []


def test_its_commands_name_tests_that_are_there() -> None:
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S):
        words = shlex.split(block, comments=True)
        tests = [word for word in words if word.startswith("tests/")]
        assert [path for path in tests if not (ROOT / path).exists()] == []
        if "-k" in words:
            assert f"{words[words.index('-k') + 1]}" in (ROOT / tests[-1]).read_text()


def test_it_is_set_up_as_the_readme_says() -> None:
    set_up = "python3 -m venv .venv && .venv/bin/pip install --quiet -e '.[test]'"
    assert set_up in PAGE
    assert set_up in README


def test_it_fits_a_page() -> None:
    assert len(PAGE.splitlines()) <= 100


def test_a_public_host_runs_the_script_and_nothing_else() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert job["container"]  # as root, as the script's packages want it


def test_commits_are_checked_as_the_script_does() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    block = re.findall(r"```bash\n(.*?)```", README, re.S)[1]  # what .ci/run runs
    linters = [step.strip() for step in block.split("&&")[3:]]
    assert [hook["entry"] for hook in hooks] == linters
