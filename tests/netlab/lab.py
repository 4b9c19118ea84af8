# SPDX-License-Identifier: Apache-2.0
"""A lab as its users hold it: made, asked and taken down; all of it lies under one folder and one process.

    with Lab.up(4, folder) as lab:
        code, output = lab.call(2, ["hostname"])
        lab.shake(delay_ms=3, jitter_ms=2, loss_percent=1)
        lab.cut(1)

Labs do not see one another: each has its own processes, networks and addresses. Knows nothing of ranks.
"""

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.netlab import wire
from tests.netlab.isolation import LabError, isolation

ROOT = Path(__file__).parents[2]
START_S = 120.0
MOST_NODES = 8

_DOWN_S = 15.0


@dataclass(frozen=True)
class NodeFacts:
    """One node as its users know it: by name and address inside the lab, by the process whose namespaces are its."""

    name: str
    address: str
    pid: int


class Command:
    """A command that runs on a node. Dropping the connection ends it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Becomes readable when the command has ended."""
        return self._connection.fileno()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code; 128 and the number of the signal that ended it.

        Raises:
            TimeoutError: it still runs.
            LabError: it could not be started, or the lab has gone.
        """
        self._connection.settimeout(timeout_s)
        answer = wire.receive(self._connection)
        self._connection.close()
        return int(_result(answer)["exit"])

    def end(self) -> None:
        """End the command: politely, after some seconds not."""
        self._connection.close()


class Lab:
    """A lab that is up.

    Args:
        folder: where everything of it lies.
    """

    def __init__(self, folder: Path, process: "subprocess.Popen[str] | None" = None) -> None:
        self.folder = folder
        self._process = process

    @classmethod
    def up(cls, num_nodes: int, folder: Path, *, outlives_caller: bool = False) -> Self:
        """Make a lab.

        Args:
            folder: does not exist yet, or belongs to a lab that has crashed.
            outlives_caller: otherwise the lab ends with this process, however that ends.

        Raises:
            Unavailable: this machine allows no labs.
            LabError: a lab is up there, or something failed.
        """
        isolate = isolation()
        if not 1 <= num_nodes <= MOST_NODES:
            raise LabError(f"expected 1 to {MOST_NODES} nodes, got {num_nodes}")
        if is_up(folder):
            raise LabError(f"{folder}: a lab is up already")
        remove(folder)
        folder.mkdir(mode=0o700, parents=True)
        command = [*isolate, sys.executable, "-m", "tests.netlab.supervisor", f"--folder={folder}"]
        command += [f"--nodes={num_nodes}", *([] if outlives_caller else ["--until-input-ends"])]
        log = folder / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL if outlives_caller else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        (folder / "process").write_text(json.dumps([process.pid, _start_time(process.pid)]))
        if not _says_ready(process):
            reason = log.read_text().strip() if log.exists() else "its supervisor ended"
            process.kill()
            process.wait()
            remove(folder)
            raise LabError(f"no lab: {reason or 'its supervisor does not answer'}")
        return cls(folder, process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def nodes(self) -> list[NodeFacts]:
        """All nodes."""
        return [NodeFacts(**node) for node in self.describe()["nodes"]]

    def describe(self) -> dict[str, Any]:
        """The nodes, the pulled cables, and whether the links are shaken."""
        return self._ask({"do": "describe"})

    def start(
        self,
        node: int | None,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> Command:
        """Start a command on a node, or with ``None`` beside the supervisor, from where all nodes can be entered.

        Args:
            folder: where it runs; default: here.
            environment: all its variables; default: this process's.
            stdin, stdout, stderr: descriptors of open files; no input by default.
        """
        request = {
            "do": "run",
            "node": node,
            "command": list(command),
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        connection = wire.connect(self.folder / "socket")
        try:
            with open(os.devnull) as nothing:
                wire.send(connection, request, [nothing.fileno() if stdin is None else stdin, stdout, stderr])
        except BaseException:
            connection.close()
            raise
        return Command(connection)

    def call(
        self, node: int | None, command: Sequence[str], *, timeout_s: float = 60.0, **options: Any
    ) -> tuple[int, str]:
        """Run a command on a node to its end: the exit code and what it printed, errors among it.

        Raises:
            TimeoutError: it was not done in time, and has been ended.
        """
        with tempfile.TemporaryFile() as output:
            running = self.start(node, command, stdout=output.fileno(), stderr=output.fileno(), **options)
            try:
                code = running.wait(timeout_s)
            except BaseException:
                running.end()
                raise
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def shake(self, delay_ms: float = 0.0, jitter_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Delay all frames between nodes, one way, let them overtake one another, and lose some."""
        self._ask({"do": "shake", "delay_ms": delay_ms, "jitter_ms": jitter_ms, "loss_percent": loss_percent})

    def cut(self, node: int) -> None:
        """Pull a node's cable."""
        self._ask({"do": "cut", "node": node})

    def heal(self, node: int | None = None) -> None:
        """Plug a node's cable in; without a node, mend everything."""
        self._ask({"do": "heal", "node": node})

    def down(self) -> None:
        """End everything that runs in the lab and remove its folder."""
        with suppress(OSError, LabError):
            self._ask({"do": "down"})
        remove(self.folder)
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with wire.connect(self.folder / "socket") as connection:
            connection.settimeout(START_S)
            wire.send(connection, request)
            return _result(wire.receive(connection))


def is_up(folder: Path) -> bool:
    """Whether the lab of a folder has its supervisor."""
    return _supervisor(folder) is not None


def remove(folder: Path) -> None:
    """End the lab of a folder, whatever state it is in, and remove the folder.

    Raises:
        LabError: it does not end.
    """
    deadline = time.monotonic() + _DOWN_S
    polite_until = time.monotonic() + _DOWN_S / 3
    while (pid := _supervisor(folder)) is not None:
        if time.monotonic() > polite_until:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # takes process 1 of the lab with it
        if time.monotonic() > deadline:
            raise LabError(f"{folder}: the lab's process {pid} does not end")
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _supervisor(folder: Path) -> int | None:
    """The process of a folder's lab, if it runs: its number may be another's by now."""
    try:
        pid, started = json.loads((folder / "process").read_text())
    except (OSError, ValueError):
        return None
    return pid if started and _start_time(pid) == started else None


def _start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _says_ready(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return bool(selector.select(START_S)) and process.stdout.readline() == "ready\n"


def _result(answer: tuple[dict[str, Any], list[int]] | None) -> dict[str, Any]:
    if answer is None:
        raise LabError("the lab has gone")
    if "error" in answer[0]:
        raise LabError(answer[0]["error"])
    return answer[0]
