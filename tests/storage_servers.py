"""Servers behind Optuna's storages: a real PostgreSQL, and Optuna's gRPC proxy."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.nursery import Nursery
from tests.ports import free_ports

_PROXY = """
import sys, optuna, warnings
warnings.simplefilter("ignore")
from concurrent.futures import ThreadPoolExecutor
storage = optuna.storages.get_storage(sys.argv[1])
optuna.storages.run_grpc_proxy_server(storage, host="localhost", port=int(sys.argv[2]))
"""


def _postgres_programs() -> Path | None:
    """Debian keeps them off the path, one folder per version."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return Path(on_path or folders[-1]).parent if on_path or folders else None


def has_postgres() -> bool:
    """Whether a PostgreSQL server and its client library are installed."""
    return _postgres_programs() is not None and importlib.util.find_spec("psycopg2") is not None


def _unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {user.pw_name for user in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class Postgres:
    """A server of its own, in a folder of its own, reached by a Unix socket there."""

    def __init__(self) -> None:
        programs = _postgres_programs()
        if programs is None:
            pytest.skip("no PostgreSQL server: neither on the path nor in /usr/lib/postgresql")
        self._pg_ctl, self._as = programs / "pg_ctl", _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="optuna-fleet-tests-pg-"))
        os.chown(self.folder, self._as.get("user", -1), self._as.get("group", -1))
        self.folder.chmod(0o711)  # for who is root in a namespace only, the socket's way
        self._data = self.folder / "data"
        options = ["-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8", "--locale=C"]
        self._run(programs / "initdb", "-D", self._data, *options)
        self.start()

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the server keeps it open
            stderr=subprocess.DEVNULL,
            timeout=240,
            check=False,
            **self._as,
        )
        log = self.folder / "log"
        assert done.returncode == 0, log.read_text() if log.exists() else command

    def start(self) -> None:
        settings = (
            f"-k {self.folder} -c listen_addresses= -c fsync=off -c shared_buffers=8MB "
            "-c dynamic_shared_memory_type=mmap -c max_connections=20"
        )
        log = self.folder / "log"
        self._run(self._pg_ctl, "-D", self._data, "-w", "-l", log, "-o", settings, "start")

    def stop(self) -> None:
        self._run(self._pg_ctl, "-D", self._data, "-w", "-m", "immediate", "stop")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def new_database(self, name: str) -> str:
        """Its URL."""
        import psycopg2

        connection = psycopg2.connect(host=str(self.folder), user="postgres")
        connection.autocommit = True
        connection.cursor().execute(f"create database {name}")
        connection.close()
        return f"postgresql+psycopg2://postgres@/{name}?host={self.folder}"


class Proxy:
    """Optuna's gRPC proxy before a storage given by its URL; its script is kept in a folder."""

    def __init__(self, url: str, folder: Path, nursery: Nursery) -> None:
        (self.port,) = free_ports(1)
        self._folder, self._nursery = folder, nursery
        script = folder / "proxy.py"
        script.write_text(_PROXY)
        self._command = [str(script), url, str(self.port)]
        self.start()

    def start(self) -> None:
        with open(os.devnull, "w") as nowhere:
            self._process = self._nursery.start(
                self._command, os.environ, nowhere, nowhere, self._folder
            )
        storage = self.connect()
        storage.wait_server_ready(timeout=240)
        storage.close()

    def connect(self) -> Any:
        return optuna.storages.GrpcStorageProxy(host="localhost", port=self.port)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
