"""A real Slurm cluster on this machine: four nodes with two "GPUs" each, three partitions.

Nothing outside its folder is touched, so several may be up at once.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.ports import free_ports

NODES = ("node1", "node2", "node3", "node4")
_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_END_LIMIT_S = 30.0

_SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={lab}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool-%n
SlurmctldPidFile={lab}/slurmctld.pid
SlurmdPidFile={lab}/slurmd-%n.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={lab}/log/completed
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
KillWait=3
MessageTimeout=10
SlurmdTimeout=10
InactiveLimit=0
MinJobAge=300
ReturnToService=2
{nodes}
PartitionName=batch Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=100 PreemptMode=OFF
"""


def why_not() -> str:
    """Why there can't be a laboratory here, or ""."""
    missing = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]
    return f"Slurm is not installed: {', '.join(missing)}" if missing else ""


class SlurmLab:
    """The cluster, while it is entered."""

    def __init__(self) -> None:
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmLab:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-lab-", dir="/tmp"))
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.down()

    @property
    def environment(self) -> dict[str, str]:
        """What makes every Slurm command one of this cluster."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return {**outside, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, check: bool = True, limit_s: float | None = None) -> str:
        """Standard output of a command on the cluster."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}{done.stdout}")
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Number of a batch job."""
        path = self.folder / "script.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        return self.run("sbatch", "--parsable", *options, str(path))

    def queue(self) -> dict[str, str]:
        """State of each job that waits or runs."""
        lines = self.run("squeue", "-h", "-o", "%i %T").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    # -- nodes ------------------------------------------------------------------------------------

    def crash(self, node: str) -> None:
        """All processes of a node are gone at once; Slurm is told, which else takes it 30 s."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        marks = {f"SLURMD_NODENAME={node}".encode(), f"LAB_DAEMON={node}".encode()}
        self._kill_all(lambda environ: not marks.isdisjoint(environ))
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crash")

    def restore(self) -> None:
        """No jobs; all nodes are up and idle."""
        self.run("scancel", "--full", f"--user={getpass.getuser()}")
        for node in NODES:
            if node not in self._daemons:
                self._start_node(node)
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.wait_for(self._is_idle)

    def _is_idle(self) -> bool:
        idle = self.run("sinfo", "-h", "-N", "-t", "idle", "-p", "batch", "-o", "%N").split()
        return sorted(idle) == sorted(NODES) and not self.queue()

    # -- up and down ------------------------------------------------------------------------------

    def _up(self) -> None:
        for name in ("state", "log", "dev"):
            (self.folder / name).mkdir()
        for number in range(2):  # a GPU has to be a device, whatever device it is
            (self.folder / f"dev/nvidia{number}").symlink_to("/dev/null")
        self._configure()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = ("pid-file", "log-file", "seed-file")
        self._start(
            "munged",
            *("munged", "-F", "--force", f"--key-file={key}"),
            f"--socket={self.folder}/munge.sock",
            *(f"--{name}={self.folder}/munge.{name}" for name in files),
        )
        self.wait_for((self.folder / "munge.sock").exists)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self._start_node(node)
        self.wait_for(self._answers)
        self.wait_for(self._is_idle)

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[index]} "
            "CPUs=4 RealMemory=2000 Gres=gpu:2"
            for index, node in enumerate(NODES)
        )
        text = _SLURM_CONF.format(
            host=host,
            port=port,
            user=getpass.getuser(),
            lab=self.folder,
            nodes=nodes,
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=node[1-4] Name=gpu File={self.folder}/dev/nvidia[0-1]\n"
        )

    def _start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command,
                env={**self.environment, "LAB": str(self.folder), "LAB_DAEMON": name},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        return "is UP" in self.run("scontrol", "ping", check=False)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Ask again and again, as Slurm tells of nothing by itself."""
        while not holds():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    log = (self.folder / "log" / f"{name}.out").read_text()[-2000:]
                    raise RuntimeError(f"{name} has ended: {log}")
            time.sleep(0.05)

    def down(self) -> None:
        """End all that runs, and remove the folder."""
        with contextlib.suppress(Exception):
            self.run("scancel", "--full", f"--user={getpass.getuser()}", limit_s=_END_LIMIT_S)
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for sent in (signal.SIGTERM, signal.SIGKILL):
            self._kill_all(lambda environ: mark in environ, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for daemon in self._daemons.values():
                    daemon.wait(3)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self, wanted: Callable[[list[bytes]], bool], sent: int = signal.SIGKILL) -> None:
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    environ = (folder / "environ").read_bytes().split(b"\0")
                    if mark in environ and wanted(environ):
                        os.kill(int(folder.name), sent)


@contextlib.contextmanager
def on_path(lab: SlurmLab) -> Iterator[Mapping[str, str]]:
    """Slurm commands of this process are those of the laboratory."""
    before = dict(os.environ)
    os.environ.update(PATH=_PATH, SLURM_CONF=lab.environment["SLURM_CONF"])
    try:
        yield os.environ
    finally:
        os.environ.clear()
        os.environ.update(before)
