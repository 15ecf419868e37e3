"""All that needs a GPU to be seen, in one command of at most 8 minutes: tests, sweeps, rates.

python benchmarks/gpu.py --report gpu.md                # one NVIDIA GPU, some CPU cores
python benchmarks/gpu.py --report cpu.md --device cpu   # the same parts, small: tries this script
python benchmarks/gpu.py --report gpu.md --only tests --only rate

Each part runs in a process of its own, under a time limit. The report is written anew after each:
what fails, or takes too long, is in it with what it said, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pairing import ROOT, SCRIPTS, environment, note

_MOST_LINES = 120  # of what a part says, in the report
_LAST_WORDS_S = 5.0
_MACHINE = """
import platform, torch, torchvision, optuna, numpy
print(f"{platform.platform()}, Python {platform.python_version()}")
print(*(f"{each.__name__} {each.__version__}" for each in (torch, torchvision, optuna, numpy)))
for device in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(device), "CUDA", torch.version.cuda)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command whose output belongs into the report.

    Attributes:
        name: Its heading.
        command: Prints Markdown, or anything if `is_text`.
        limit_s: When it is killed.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    is_text: bool = False


def parts_for(device: str) -> list[Part]:
    """What there is to run; on a GPU the limits add up to less than 8 minutes."""
    python = sys.executable
    patience = 1 if device == "cuda" else 5  # a machine without a GPU may be slow and busy
    # Another version of Python or torch may warn of something: that is no failure here.
    tests = (python, "-m", "pytest", "tests/test_gpu.py", "-rA", "-W", "default", "--tb=short")

    machine = (python, "-c", _MACHINE)
    return [
        Part(name=name, command=command, limit_s=limit_s * patience, is_text=is_text)
        for name, command, limit_s, is_text in (
            ("environment", machine, 40, True),
            ("tests", tests, 140, True),
            ("rate", (python, str(SCRIPTS / "gpu_rate.py"), device), 85, False),
            ("sweep", (python, str(SCRIPTS / "gpu_sweep.py"), device), 60, False),
        )
    ]


def run_part(part: Part) -> str:
    """Run a part to its end, whatever that is; return its section of the report."""
    note(f"{part.name} (at most {part.limit_s:g} s)")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env={**environment(), "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,  # it is killed with what it has started
        )
        try:
            code = process.wait(part.limit_s)
            ending = "done" if code == 0 else f"**failed** (code {code})"
        except subprocess.TimeoutExpired:
            ending = f"**not done** within {part.limit_s:g} s"
            process.send_signal(signal.SIGABRT)  # faulthandler says where it is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
        finally:
            _kill_group(process)
        said, logged = (_end_of(file) for file in (out, log))
    took = f"{ending} in {time.monotonic() - began:.0f} s"
    note(f"{part.name}: {took}")
    section = [f"## {part.name}: {took}", _fenced(said) if part.is_text else said]
    if ending != "done":
        section.append("It said on standard error:\n\n" + _fenced(logged))
    return "\n\n".join(filter(None, section))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(file: object) -> str:
    assert hasattr(file, "seek")
    assert hasattr(file, "read")
    file.seek(0)
    lines = file.read().splitlines()
    left_out = [f"... ({len(lines) - _MOST_LINES} lines before)"] * (len(lines) > _MOST_LINES)
    return "\n".join([*left_out, *lines[-_MOST_LINES:]]).strip()


def _fenced(text: str) -> str:
    return f"````\n{text}\n````" if text else ""


def write_report(path: Path, parts: Sequence[Part]) -> bool:
    """Run the parts, write the report after each of them; return whether all were done."""
    began = time.strftime("%Y-%m-%d %H:%M")
    sections = [f"# On a GPU, {began}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        left = ", ".join(other.name for other in parts[number:])
        path.write_text("\n\n".join([*sections, f"Not yet: {left}."]) + "\n")
        try:
            sections.append(run_part(part))
        except OSError as error:  # it can't even be started
            sections.append(f"## {part.name}: **failed**\n\n{error}")
    path.write_text("\n\n".join(sections) + "\n")
    return not any("**" in section.partition("\n")[0] for section in sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True, help="where to write, in Markdown")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    names = [part.name for part in parts_for("cpu")]
    parser.add_argument("--only", choices=names, action="append", help="may be repeated")
    arguments = parser.parse_args()
    chosen = arguments.only or names
    parts = [part for part in parts_for(arguments.device) if part.name in chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part under way is ended too
    is_done = write_report(arguments.report, parts)
    print(arguments.report.read_text())
    sys.exit(not is_done)


if __name__ == "__main__":
    main()
