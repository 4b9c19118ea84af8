# SPDX-License-Identifier: Apache-2.0
"""A lab is what it says: nodes that share nothing but files, links that can be shaken and cut, nothing left behind."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.netlab import jobs
from tests.netlab.isolation import LabError
from tests.netlab.lab import ROOT, Lab, is_up, remove

PATIENCE_S = 60.0

TALK = """
import socket, sys, time
role, host, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
if role == "serve":
    connection, _ = socket.create_server(("", 5000)).accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data)
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((host, 5000), timeout=seconds)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    took = []
    for _ in range(5):
        started = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        took.append(time.monotonic() - started)
    print(sorted(took)[2])
    connection.sendall(b"y" * 3000000)
    got = b""
    while len(got) < 3000000:
        got += connection.recv(1 << 20)
    assert got == b"y" * 3000000
"""


def talk(lab: Lab, patience_s: float = 20.0) -> float:
    """Have node 1 send to node 0 and back: the median round trip in seconds; three megabytes come back whole.

    Raises:
        AssertionError: no answer within the patience.
    """
    python = [sys.executable, "-S", "-c", TALK]
    server = lab.start(0, [*python, "serve", "", "0"])
    try:
        code, output = lab.call(1, [*python, "call", "node0", str(patience_s)], timeout_s=2 * PATIENCE_S)
    finally:
        server.end()
    assert code == 0, output
    return float(output)


def processes_of(folder: Path) -> list[str]:
    """Commands on this machine, the lab's own included, that name its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


def num_processes(lab: Lab, node: int) -> int:
    """How many processes a node has, those that count them among them."""
    return int(lab.call(node, ["sh", "-c", "ls /proc | grep -c '^[0-9]*$'"])[1])


def test_nodes_share_files_and_nothing_else(lab: Lab) -> None:
    describe = (
        "hostname; cat /proc/sys/kernel/random/boot_id; ls /dev/shm; ls /proc | grep -c '^[0-9]*$'; echo here > {}"
    )
    with tempfile.TemporaryDirectory() as shared:
        path = Path(shared) / "file"
        code, output = lab.call(3, ["sh", "-c", "touch /dev/shm/mine; " + describe.format(path)])
        hostname, boot, segment, num_processes = output.split()
        assert (code, hostname, segment) == (0, "node3", "mine")
        assert int(num_processes) < 10, "a node sees its own processes alone"
        assert path.read_text() == "here\n"
    assert lab.call(4, ["ls", "/dev/shm"]) == (0, "")
    assert lab.call(3, ["rm", "/dev/shm/mine"]) == (0, "")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert lab.call(2, ["sh", "-c", "exit 7"])[0] == 7


def test_shaken_links_are_late_and_lossy_and_lose_no_data(lab: Lab) -> None:
    talk(lab)
    lab.shake(delay_ms=30, jitter_ms=10, loss_percent=1)
    assert lab.describe()["shaken"]
    assert talk(lab) > 0.040, "twice the delay less the jitter"
    lab.heal()
    assert not lab.describe()["shaken"]


@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_a_cut_node_hears_nothing_until_it_is_healed(lab: Lab, delay_ms: float) -> None:
    lab.shake(delay_ms=delay_ms)
    lab.cut(1)
    with pytest.raises(AssertionError, match=r"timed out|No route to host"):
        talk(lab, patience_s=1.0)
    lab.heal(1)
    talk(lab)


def test_a_command_ends_with_its_caller(lab: Lab, tmp_path: Path) -> None:
    started = tmp_path / "started"
    running = lab.start(5, ["sh", "-c", f"trap '' TERM; touch {started}; while :; do sleep 0.1; done"])
    wait_until(started.exists)
    running.end()
    wait_until(lambda: num_processes(lab, 5) <= 4)  # the first one, and the three that look


def test_refusals_say_what_is_wrong(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="1 to 8 nodes, got 9"):
        Lab.up(9, tmp_path / "lab")
    with pytest.raises(LabError, match="is up already"):
        Lab.up(2, lab.folder)
    with pytest.raises(LabError, match="2 different nodes below 8, got"):
        jobs.torchrun(lab, [2, 2], ["x.py"], nodes=[1, 1])
    with pytest.raises(LabError, match="at least one rank"):
        jobs.torchrun(lab, [2, 0], ["x.py"])
    for refused in (lambda: lab.call(8, ["true"]), lambda: lab.cut(-1), lambda: lab.heal(8)):
        with pytest.raises(LabError, match=r"expected a node from 0 to 7, got (8|-1)$"):
            refused()
    for weather in ({"delay_ms": -1.0}, {"jitter_ms": float("nan")}, {"loss_percent": 101.0}):
        with pytest.raises(LabError, match="expected"):
            lab.shake(**weather)
    assert not lab.describe()["shaken"]
    assert not lab.describe()["cut"]


@pytest.mark.parametrize("end", ["down", "killed", "abandoned"])
def test_a_lab_leaves_nothing_behind_and_meets_no_other(needs_labs: None, end: str) -> None:
    """Whatever ends it; and it lives beside the standing one, with the same names and addresses."""
    with tempfile.TemporaryDirectory(prefix="netlab-") as parent:
        folder = Path(parent) / "lab"
        lab = Lab.up(2, folder)
        sleeper = lab.start(1, ["sh", "-c", f"sleep 1000; echo {folder}"])
        wait_until(lambda: any("sleep 1000" in command for command in processes_of(folder)))
        match end:
            case "down":
                lab.down()
            case "killed":
                pid = int((folder / "process").read_text().strip("[]").split(",")[0])
                os.kill(pid, signal.SIGKILL)
            case "abandoned":  # what the kernel does for a process that ends
                assert lab._process is not None
                assert lab._process.stdin is not None
                lab._process.stdin.close()
        wait_until(lambda: not is_up(folder) and not processes_of(folder))
        with pytest.raises(LabError, match="has gone"):
            sleeper.wait(PATIENCE_S)
        remove(folder)
        assert not folder.exists()
        lab.down()  # again: nothing to do


def test_the_command_line(needs_labs: None) -> None:
    name = f"test-{os.getpid()}"
    environment = {name: value for name, value in os.environ.items() if name != "NETLAB"}
    netlab = [str(ROOT / "scripts/netlab")]

    def run(*words: str) -> tuple[int, str]:
        from tests import launch_mpi

        return launch_mpi.run_command([*netlab, *words], env=environment | {"NETLAB": name, "PYTHON": sys.executable})

    try:
        assert run("status")[0] == 2
        assert run("up", "2") == (0, "node0  10.77.0.1\nnode1  10.77.0.2\n")
        assert run("exec", "1", "sh", "-c", "hostname; exit 3") == (3, "node1\n")
        assert run("cut", "1")[0] == 0
        assert "node1  10.77.0.2  cut off" in run("status")[1]
        assert run("heal")[0] == 0
    finally:
        assert run("down")[0] == 0
    assert "not up" in run("status")[1]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for something that comes about soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
