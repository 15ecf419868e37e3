"""Attacks on a sweep while it runs: strangers, tampering, and what others on the machine can see.

A pruner carries them out: it runs in the driver, while the trial that asked waits for its answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import random
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

import optuna_fleet
from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.wire import listener
from optuna_fleet.wire.channel import HELLO, connect
from optuna_fleet.wire.invitation import Invitation, make_credentials
from tests.fleets import Leg, fleet_of, train
from tests.test_channel import PATIENCE_S, Bomb, hangs_up
from tests.waiting import until

SCRIPT = {0: [Leg((0, 1), until_epoch=1), Leg((1, 0))], 1: [Leg((0,))], 2: [Leg((1,))]}
LOOPBACK = "0100007F"


# -- what is seen of the sweep -------------------------------------------------------------------


def processes_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        children = [child for thread in threads for child in thread.read_text().split()]
    except OSError:  # it has just ended
        return []
    return [pid, *(one for child in children for one in processes_of(int(child)))]


def fleet_processes() -> list[int]:
    return [pid for pid in processes_of(os.getpid()) if pid != os.getpid()]


def links(pid: int) -> dict[str, str]:
    """What a process has open, by descriptor."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses (in the kernel's words) and ports where these processes take connections."""
    ours = {link for pid in pids for link in links(pid).values()}
    found = set()
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            is_open = fields[3] == "0A" or family.startswith("udp")
            if is_open and f"socket:[{fields[9]}]" in ours:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


# -- the sweep -----------------------------------------------------------------------------------


class Attack(optuna.pruners.BasePruner):
    """Does something at each report of a trial, and never prunes."""

    def __init__(self, act: Callable[[optuna.trial.FrozenTrial], None]) -> None:
        self._act = act

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        self._act(trial)
        return False


def results(fleet: Any, act: Callable[[optuna.trial.FrozenTrial], None]) -> list[Any]:
    """Every number that the trials of a sweep computed, with attacks on its way."""
    study = optuna.create_study(pruner=Attack(act))
    fleet.script = SCRIPT
    study.optimize(functools.partial(train, epochs=2), n_trials=3, executor=fleet)
    return [
        (t.state, t.values, t.user_attrs["losses"], t.user_attrs["noise"]) for t in study.trials
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def fleet(folder: Path, afresh: None) -> Iterator[Any]:
    """Two slots; whatever is not protected on purpose is open to all."""
    umask = os.umask(0)
    try:
        with fleet_of(devices=2, checkpoints=folder / "new" / "checkpoints") as executor:
            yield executor
    finally:
        os.umask(umask)


@pytest.fixture(scope="module")
def undisturbed(fleet: Any) -> list[Any]:
    return results(fleet, lambda trial: None)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the fleet says to its user."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("optuna.fleet")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def bother(port: int, words: bytes, *, is_dropped: bool) -> None:
    """Connect, say something, and go, in the end after having been hung up on."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(words)
            sock.shutdown(socket.SHUT_WR)
        assert not is_dropped or hangs_up(sock)


def test_strangers_change_nothing_and_nobody_else_can_see_it(
    fleet: Any,
    undisturbed: list[Any],
    said: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage, other certificates, half-open connections in their hundreds; a look at it all.

    Also on the ports of torch: what those can't resist, see the docs.
    """
    monkeypatch.setattr(listener, "_QUIET_S", 1000.0)  # this may take long
    connections, rng = fleet._runner._runtime.connections, random.Random(0)
    address = connections.host, connections.port
    bomb, reports, ports = pickle.dumps(Bomb(tmp_path / "boom")), [], set()
    half_open: list[socket.socket] = []

    def attack(trial: optuna.trial.FrozenTrial) -> None:
        reports.append(trial.number)
        garbage = [rng.randbytes(2 ** rng.randrange(18)) for _ in range(5)]
        for words in (b"", bomb, HELLO + bomb, *garbage):
            bother(connections.port, words, is_dropped=True)
        other = dataclasses.replace(connections.invitation, credentials=make_credentials())
        with pytest.raises(ProtocolError):
            connect(other)
        half_open.extend(socket.create_connection(address) for _ in range(150))
        if trial.number == 0:
            for _, port in listening(fleet_processes()) - {(LOOPBACK, connections.port)}:
                ports.add(port)
                for size in (0, 1, 7, 8, 9, 100, 2**16):
                    bother(port, rng.randbytes(size), is_dropped=False)
        if trial.number == 0 and len(trial.intermediate_values) == 2:
            look(fleet, folder)  # it has moved: so all that a sweep makes is there

    threads, files = threading.active_count(), open_files(fleet)
    assert results(fleet, attack) == undisturbed
    assert len(reports) == 6
    assert len(ports) >= 3  # the store and two ranks
    for sock in half_open:
        sock.close()
    assert not list(tmp_path.iterdir())
    (line,) = said
    assert "A stranger was refused" in line
    assert connections.invitation.token not in line
    assert threading.active_count() <= threads
    until(lambda: open_files(fleet) <= files)  # it hears of the last ones' end


def open_files(fleet: Any) -> int:
    """Descriptors of the driver and the agent."""
    agent = fleet._runner._runtime.agents.nodes.named("local-0").pid
    return len(os.listdir("/proc/self/fd")) + len(os.listdir(f"/proc/{agent}/fd"))


def test_what_is_put_into_a_connection_costs_a_restart_and_no_result(
    fleet: Any, undisturbed: list[Any], said: list[str], tmp_path: Path
) -> None:
    """As by someone who can write into the packets of a network."""
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    frame = len(bomb).to_bytes(8, "big") + bytes(32) + bomb
    runtime, done = fleet._runner._runtime, []

    def attack(trial: optuna.trial.FrozenTrial) -> None:
        if not done:
            done.extend(runtime.trainers.live.values())
            for pid in done:
                os.write(runtime.connections.trainers[pid].fileno(), frame)

    study = optuna.create_study(pruner=Attack(attack))
    study.optimize(functools.partial(train, epochs=2), n_trials=2, executor=fleet)
    assert len(done) == 2
    assert not set(done) & set(runtime.trainers.live.values())
    for trial, expected in zip(study.trials, undisturbed, strict=False):
        assert trial.user_attrs["losses"] == pytest.approx(expected[2])
    assert any("is run again" in line for line in said)
    assert not list(tmp_path.iterdir())


# -- what others can see -------------------------------------------------------------------------


def look(fleet: Any, folder: Path) -> None:
    pids = fleet_processes()
    checkpoints = [path for path in folder.rglob("*") if path.is_file()]
    assert len(pids) >= 4  # agent, store, two trainers
    assert checkpoints
    check_ports(pids)
    check_key(fleet._runner._runtime.connections.invitation, pids)
    check_modes(folder / "new" / "checkpoints")
    if os.geteuid() == 0:
        check_other_user(checkpoints)


def check_ports(pids: list[int]) -> None:
    found = listening([os.getpid(), *pids])
    assert len(found) >= 4  # driver, store, two ranks
    assert {address for address, _ in found} == {LOOPBACK}


def check_key(invitation: Invitation, pids: list[int]) -> None:
    key = invitation.credentials.splitlines()[-2]
    forms = [key, invitation.token.encode()[-100:]]
    for pid in pids:
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not any(form in text for form in forms), f"{name} of {pid}"


def check_modes(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def check_other_user(files: list[Path]) -> None:
    """What another user of the machine can get at: nothing, not even through /proc."""
    pids = [os.getpid(), *fleet_processes()]
    chunks = [
        f"/proc/{pid}/fd/{fd}"
        for pid in pids
        for fd, link in links(pid).items()
        if "memfd:optuna-fleet" in link
    ]
    private = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "maps")]
    assert chunks
    script = (
        "import sys\n"
        "for path in sys.argv[1:]:\n"
        "    try: open(path, 'rb').read(1); print(path)\n"
        "    except OSError: print('refused')"
    )
    paths = [*chunks, *private, *map(str, files)]
    assert as_other_user(script, *paths, "/proc/version") == [
        *["refused"] * len(paths),
        "/proc/version",
    ]


def as_other_user(script: str, *arguments: str) -> list[str]:
    """What a script prints that another user of the machine runs; for root only."""
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", script, *arguments],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_nothing_of_torch_unpickles_what_a_peer_sent() -> None:
    """Peers of its process groups prove nothing; so only tensors come from them."""
    root = Path(optuna_fleet.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        assert "_object(" not in text.replace("def has_object(", ""), path
        assert text.count("torch.load(") == text.count("weights_only=True"), path
