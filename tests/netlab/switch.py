# SPDX-License-Identifier: Apache-2.0
"""The switch between the nodes: the kernel's bridge in fair weather, the shaker in foul, and cables pulled.

A pulled cable is silent: the node's interface stays up and its frames go nowhere, as behind a switch that has failed.
Connections live through a change from one to the other. Runs in the supervisor, in the network namespace of the ports.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from tests.netlab.isolation import LabError
from tests.netlab.shaker import Weather

MTU_BYTES = 9000
"""Jumbo frames, as in clusters."""

_BRIDGE = "bridge"


class Switch:
    """One switch.

    Args:
        ports: interfaces of this network namespace, by node.
        set_offloads: switches the offloads of all nodes' interfaces.
    """

    def __init__(self, ports: Sequence[str], set_offloads: Callable[[bool], None]) -> None:
        self._ports = tuple(ports)
        self._set_offloads = set_offloads
        self._shaker: subprocess.Popen[bytes] | None = None
        self.weather = Weather()
        run_ip([f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"])
        run_ip([f"link set {port} {word}" for port in self._ports for word in (f"master {_BRIDGE}", "up")])

    @property
    def is_shaken(self) -> bool:
        """Whether frames pass through the shaker."""
        return self._shaker is not None

    def shake(self, delay_ms: float, jitter_ms: float, loss_percent: float) -> None:
        """Have all frames delayed and lost from now on; with three zeros, no more.

        Raises:
            LabError: a time below 0, or a loss that is no share.
        """
        if not (0 <= delay_ms < math.inf and 0 <= jitter_ms < math.inf):
            raise LabError(
                f"expected milliseconds of at least 0, got a delay of {delay_ms:g}, a jitter of {jitter_ms:g}"
            )
        if not 0 <= loss_percent <= 100:
            raise LabError(f"expected a loss of 0 to 100 per cent, got {loss_percent:g}")
        self._apply(replace(self.weather, delay_ms=delay_ms, jitter_ms=jitter_ms, loss_percent=loss_percent))

    def cut(self, node: int) -> None:
        """Let no frame of a node pass."""
        self._apply(replace(self.weather, cut=tuple({*self.weather.cut, node})))

    def heal(self, node: int | None) -> None:
        """Mend the cable of one node, or everything."""
        if node is None:
            self._apply(Weather())
        else:
            self._apply(replace(self.weather, cut=tuple({*self.weather.cut} - {node})))

    def _apply(self, weather: Weather) -> None:
        self.weather = weather
        if not any((weather.delay_ms, weather.jitter_ms, weather.loss_percent)):
            self._stop_shaker()
            run_ip([f"link set {port} {self._place(node)}" for node, port in enumerate(self._ports)])
            return
        if self._shaker is None:
            self._set_offloads(False)
            run_ip([f"link set {port} nomaster" for port in self._ports])
            command = [sys.executable, "-m", "tests.netlab.shaker", *self._ports]
            self._shaker = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._shaker.stdin is not None
        self._shaker.stdin.write(json.dumps(asdict(weather)).encode() + b"\n")
        self._shaker.stdin.flush()

    def _place(self, node: int) -> str:
        return "nomaster" if node in self.weather.cut else f"master {_BRIDGE}"

    def _stop_shaker(self) -> None:
        if self._shaker is None:
            return
        assert self._shaker.stdin is not None
        self._shaker.stdin.close()
        self._shaker.wait()
        self._shaker = None
        self._set_offloads(True)


def run_ip(commands: Sequence[str]) -> None:
    """Run commands of ``ip`` in this network namespace.

    Raises:
        RuntimeError: one failed; with what it said.
    """
    done = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(commands) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr.strip()}")
