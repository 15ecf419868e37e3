"""Whatever becomes of the solver process, there is a plan."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
from alloc_cases import slide_problem
from alloc_misbehaving import Misbehaving

from optuna_fleet.alloc import (
    Candidate,
    GreedyAllocator,
    IsolatedAllocator,
    MipAllocator,
)

pytestmark = pytest.mark.usefixtures("afresh")

GOOD = slide_problem(time_limit_s=20.0)
BAD = replace(GOOD, candidates=(Candidate(number=99, rates=(30.0,)), *GOOD.candidates))


@pytest.fixture
def isolated():
    made = []

    def make(allocator):
        made.append(IsolatedAllocator(allocator, GreedyAllocator()))
        return made[-1]

    yield make
    for allocator in made:
        allocator.close()


def plan_of(allocator, problem=GOOD):
    return allocator.submit(problem).result(240)


def test_the_plan_is_that_of_the_isolated_allocator_also_when_the_driver_is_interrupted(isolated):
    allocator = isolated(MipAllocator())
    assert allocator.name == "mip"
    assert plan_of(allocator) == MipAllocator().allocate(GOOD)
    os.kill(allocator.pid, signal.SIGINT)
    assert os.getsid(allocator.pid) == allocator.pid
    assert plan_of(allocator) == MipAllocator().allocate(GOOD)


def test_who_waits_while_it_is_closed_gets_no_plan(isolated):
    allocator = isolated(Misbehaving("hang"))
    plan_of(allocator)
    plan = allocator.submit(BAD)
    allocator.close()
    with pytest.raises(CancelledError):
        plan.result(240)
    assert plan_of(allocator).allocator == "misbehaving"


def test_where_no_thread_can_be_started_the_plan_is_the_fallbacks(isolated, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    allocator = isolated(Misbehaving("hang"))
    monkeypatch.setattr(threading.Thread, "start", start)
    plan = allocator.submit(GOOD).result(0)
    cause = "fallback: no thread can wait for a solver: can't start new thread"
    assert (plan.allocator, plan.status) == (GreedyAllocator().name, cause)


def test_what_the_solver_prints_is_not_taken_for_its_answer(isolated):
    assert plan_of(isolated(Misbehaving("prattle")), BAD).allocator == "misbehaving"


def test_an_allocator_that_can_not_be_sent_falls_back(isolated):
    unsendable = Misbehaving("hang", name=(n for n in "x"))
    plan = plan_of(isolated(unsendable))
    assert plan.status.startswith("fallback: solver process can't be asked")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell the child")
def test_a_hanging_child_dies_with_its_parent(tmp_path):
    fifo = tmp_path / "hanging"
    os.mkfifo(fifo)
    script = (
        "import os\n"
        "from alloc_misbehaving import Misbehaving\n"
        "from test_alloc_isolation import BAD\n"
        "from optuna_fleet.alloc import GreedyAllocator, IsolatedAllocator\n"
        "IsolatedAllocator(Misbehaving('hang'), GreedyAllocator()).submit(BAD)\n"
        "open(os.environ['TELL_HANGING']).read()\n"
        "os._exit(0)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TELL_HANGING": str(fifo)}
    # The child inherits stderr, so this returns once both are gone; the child alone takes 600 s.
    subprocess.run(
        [sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, timeout=500, check=True
    )
