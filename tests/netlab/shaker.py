# SPDX-License-Identifier: Apache-2.0
"""A switch in user space that delays, reorders and loses frames, since the kernel's netem is not everywhere.

    python -m tests.netlab.shaker p0 p1 p2      # then on standard input, one JSON object a line, see ``Weather``

It reads the frames that arrive on the ports through packet sockets, learns who is where, and hands each frame on when
its time has come. Ends with its input. Frames must be of the wire's size and complete: the nodes' offloads are off.
"""

import heapq
import json
import os
import random
import selectors
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

LONGEST_FRAME_BYTES = 9000 + 18

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_BUFFER_BYTES = 8 << 20
_AT_ONCE = 64
"""Frames read from one port before the others have their turn."""


@dataclass(frozen=True)
class Weather:
    """What befalls each frame on its way through the switch.

    Args:
        delay_ms: how long it takes; there and back again costs twice that.
        jitter_ms: the delay varies evenly by so much in both directions, so frames overtake one another.
        loss_percent: how many are lost, by chance.
        cut: ports that no frame leaves or reaches.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    cut: tuple[int, ...] = ()


class Shaker:
    """The switch."""

    def __init__(self, ports: list[str], seed: int = 0) -> None:
        self.weather = Weather()
        self._sockets = [_open(port) for port in ports]
        self._port_of: dict[bytes, int] = {}
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._random = random.Random(seed)
        self._num_frames = 0

    def run(self, control: int) -> None:
        """Forward until the control file ends."""
        selector = selectors.DefaultSelector()
        selector.register(control, selectors.EVENT_READ, -1)
        for port, packets in enumerate(self._sockets):
            selector.register(packets, selectors.EVENT_READ, port)
        rest = b""
        while True:
            pause_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            for key, _ in selector.select(pause_s):
                if key.data >= 0:
                    self._receive(key.data)
                    continue
                if not (data := os.read(control, 4096)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    fields = json.loads(line)
                    self.weather = Weather(**fields | {"cut": tuple(fields["cut"])})
            self._deliver()

    def _receive(self, port: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = self._sockets[port].recv(LONGEST_FRAME_BYTES + 1)
            except OSError:
                return
            if len(frame) <= LONGEST_FRAME_BYTES:  # longer ones were sent before the offloads were off
                self._forward(port, frame)

    def _forward(self, port: int, frame: bytes) -> None:
        weather = self.weather
        if port in weather.cut or self._random.random() * 100 < weather.loss_percent:
            return
        target, source = frame[:6], frame[6:12]
        self._port_of[source] = port
        known = self._port_of.get(target)
        ports = [known] if known is not None else [other for other in range(len(self._sockets)) if other != port]
        delay_ms = max(0.0, weather.delay_ms + self._random.uniform(-1, 1) * weather.jitter_ms)
        due = time.monotonic() + delay_ms / 1000
        for target_port in ports:
            self._num_frames += 1
            heapq.heappush(self._queue, (due, self._num_frames, target_port, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._queue)
            if port not in self.weather.cut:
                with suppress(OSError):  # its queue is full, or its node gone: the frame is lost, as on any switch
                    self._sockets[port].send(frame)


def _open(port: str) -> socket.socket:
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)  # or it would forward what it has sent
    packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    packets.setblocking(False)
    packets.bind((port, _ETH_P_ALL))
    return packets


if __name__ == "__main__":
    Shaker(sys.argv[1:]).run(sys.stdin.fileno())
