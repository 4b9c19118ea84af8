# SPDX-License-Identifier: Apache-2.0
"""The process that keeps a lab: it makes the nodes and the switch, and serves requests until the lab is taken down.

It is process 1 of a namespace of processes, in which all that the lab ever starts lives: when it ends, however, the
kernel ends all of that, and with the processes go their networks and mounts. Started by ``lab.py``; one thread for
each request.
"""

import argparse
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.netlab import wire
from tests.netlab.isolation import LabError
from tests.netlab.switch import MTU_BYTES, Switch, run_ip

NAMESPACES = ("net", "uts", "ipc", "mount", "pid")
"""What a node has of its own, as options of ``unshare`` and ``nsenter``."""

_GRACE_S = 5.0
"""Between the request to end and the kill, for a command whose caller has gone."""


class Node:
    """One node.

    Args:
        hosts_file: what the node sees as /etc/hosts.
    """

    def __init__(self, number: int, hosts_file: Path) -> None:
        self.name = node_name(number)
        self.address = node_address(number)
        self.port = f"p{number}"
        self._hosts_file = hosts_file
        isolate = [*(f"--{name}" for name in NAMESPACES), "--fork", "--kill-child", "--mount-proc"]
        init = str(Path(__file__).with_name("node.py"))
        self._process = subprocess.Popen(
            ["unshare", *isolate, sys.executable, "-I", "-S", init],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """The process whose namespaces are the node's; that of processes is the one of its children."""
        return self._process.pid

    def attach(self) -> None:
        """Plug the node into a port of this network namespace."""
        self._expect("born")
        ends = f"{self.port} mtu {MTU_BYTES} type veth peer name eth0 mtu {MTU_BYTES} netns {self.pid}"
        run_ip([f"link add {ends}"])
        words = {"name": self.name, "address": self.address, "hosts_file": str(self._hosts_file)}
        self.tell(json.dumps(words))

    def tell(self, line: str) -> None:
        """Give the node's first process a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """The node is furnished."""
        self._expect("ready")

    def set_offloads(self, on: bool) -> None:
        """Switch the offloads of its network interface."""
        self.tell(f"offloads {'on' if on else 'off'}")
        self._expect("done")

    def enter(self, command: Sequence[str], folder: str) -> list[str]:
        """The command line that runs a command on this node."""
        joined = [f"--{name}" for name in NAMESPACES if name != "pid"]
        joined += [f"--pid=/proc/{self.pid}/ns/pid_for_children"]
        return ["nsenter", f"--target={self.pid}", *joined, "--", "env", f"--chdir={folder}", *command]

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if answer != word:
            raise RuntimeError(f"{self.name}: expected {word!r} of its first process, got {answer!r}")


class Supervisor:
    """The nodes, the switch, and what may be asked of them."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        hosts_file = folder / "hosts"
        lines = [f"{node_address(number)} {node_name(number)}" for number in range(num_nodes)]
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        run_ip(["link set lo up"])
        self.nodes = [Node(number, hosts_file) for number in range(num_nodes)]
        for node in self.nodes:
            node.attach()
        for node in self.nodes:
            node.wait_until_ready()
        self._switching = threading.Lock()
        self.switch = Switch([node.port for node in self.nodes], self._set_offloads)

    def serve(self, connection: socket.socket) -> None:
        """Answer one request; whatever fails is the answer."""
        with connection:
            request = wire.receive(connection)
            if request is None:
                return
            message, files = request
            try:
                answer = self._answer(connection, message, files)
            except LabError as error:
                answer = {"error": str(error)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            finally:
                wire.close_all(files)
            with suppress(OSError):
                wire.send(connection, answer)

    def _answer(self, connection: socket.socket, message: dict[str, Any], files: list[int]) -> dict[str, Any]:
        node = message.get("node")
        if node is not None and not 0 <= node < len(self.nodes):
            raise LabError(f"expected a node from 0 to {len(self.nodes) - 1}, got {node}")
        match message.pop("do"):
            case "run":
                return {"exit": self._run(connection, files, **message)}
            case "describe":
                return self._describe()
            case "down":
                os.kill(os.getpid(), signal.SIGTERM)
                return {}
            case "shake" | "cut" | "heal" as verb:
                with self._switching:
                    getattr(self.switch, verb)(**message)
                return {}
            case other:
                raise ValueError(f"no such request: {other}")

    def _describe(self) -> dict[str, Any]:
        nodes = [{"name": node.name, "address": node.address, "pid": node.pid} for node in self.nodes]
        weather = self.switch.weather
        return {"nodes": nodes, "shaken": self.switch.is_shaken, "cut": list(weather.cut)}

    def _run(
        self,
        connection: socket.socket,
        files: list[int],
        node: int | None,
        command: list[str],
        folder: str,
        environment: dict[str, str],
    ) -> int:
        """Run a command until it ends or its caller goes."""
        if node is not None:
            command = self.nodes[node].enter(command, folder)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            start_new_session=True,
        )
        end = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            poll.register(connection, select.POLLIN)  # a caller says nothing more; it can only go
            ready = [file for file, _ in poll.poll()]
            if end not in ready:
                _signal(process, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                _signal(process, signal.SIGKILL)
        finally:
            os.close(end)
        code = process.wait()
        return 128 - code if code < 0 else code

    def _set_offloads(self, on: bool) -> None:
        for node in self.nodes:
            node.set_offloads(on)


def node_name(number: int) -> str:
    """The hostname of a node."""
    return f"node{number}"


def node_address(number: int) -> str:
    """The address of a node in its lab's network; all labs use the same ones, for none sees another."""
    return f"10.77.0.{number + 1}"


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def main() -> None:
    """Make the lab, say ``ready``, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--until-input-ends", action="store_true")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 has no default for it
    try:
        supervisor = Supervisor(folder, arguments.nodes)
        with wire.listen(folder / "socket") as listener:
            print("ready", flush=True)
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            if arguments.until_input_ends:
                poll.register(0, select.POLLIN)
            while 0 not in [file for file, _ in poll.poll()]:
                connection, _ = listener.accept()
                threading.Thread(target=supervisor.serve, args=(connection,), daemon=True).start()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
