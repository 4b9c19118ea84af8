# SPDX-License-Identifier: Apache-2.0
"""The public check of transports: loopback passes it, and each broken transport fails it for its own reason."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from detcomm import testing
from detcomm.errors import DetcommError, PeerTimeoutError
from detcomm.transports import loopback
from detcomm.transports.base import Parcel, Transport

Wrap = Callable[[Transport], Transport]


def _check(world_size: int, wrap: Wrap = lambda transport: transport) -> None:
    """``check_transport`` on each rank; the outer transport only carries the threads."""
    hubs: list[loopback.LoopbackHub] = [loopback.LoopbackHub(world_size) for _ in range(16)]

    def body(outer: Transport) -> None:
        ends = iter(hub.transports[outer.rank] for hub in hubs)
        try:
            testing.check_transport(lambda: wrap(next(ends)))
        except BaseException as error:  # the others must not wait for a rank whose check has failed
            for hub in hubs:
                hub.leave(outer.rank, f"rank {outer.rank} failed its check: {error}")
            raise

    loopback.run(world_size, body)


class _Wrapped(Transport):
    """Passes everything on."""

    name = "wrapped"

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        self._inner.exchange(sends, recvs, timeout_s)

    def close(self) -> None:
        self._inner.close()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)


class _OutOfOrder(_Wrapped):
    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        by_size = sorted(sends, key=lambda parcel: parcel.data.size)
        self._inner.exchange(by_size, sorted(recvs, key=lambda parcel: parcel.data.size), timeout_s)
        same = [parcel for parcel in recvs if parcel.data.size == 4096]
        if len(same) > 1:  # two messages of one size, swapped
            same[0].data[:], same[1].data[:] = same[1].data.copy(), same[0].data.copy()


class _DropsLastByte(_Wrapped):
    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        self._inner.exchange(sends, recvs, timeout_s)
        for parcel in recvs:
            if parcel.data.size > 1 << 20:
                parcel.data[-1] ^= 255


class _SilentTimeout(_Wrapped):
    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        try:
            self._inner.exchange(sends, recvs, timeout_s)
        except PeerTimeoutError:
            return


class _ForgetsReason(_Wrapped):
    def abort(self, reason: str) -> None:
        self._inner.abort("something happened")


class _SharesMemory(_Wrapped):
    """Sends one turn late from the caller's own memory, as a transport without a copy or a wait would."""

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        self._inner.exchange(sends, recvs, timeout_s)
        if recvs and all(parcel.data.size == 10000 for parcel in recvs):
            for parcel in recvs:
                parcel.data[:] = 255


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_loopback_keeps_the_contract(world_size: int) -> None:
    _check(world_size)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (_OutOfOrder, "out of order"),
        (_DropsLastByte, "a large message"),
        (_SharesMemory, "was overwritten"),
        (_SilentTimeout, "a peer that never sends must raise PeerTimeoutError"),
        (_ForgetsReason, "abort's reason"),
    ],
)
def test_a_broken_transport_is_caught(broken: Wrap, reason: str) -> None:
    with pytest.raises((AssertionError, DetcommError), match=reason):
        _check(3, broken)


def test_a_single_rank_shows_nothing() -> None:
    with pytest.raises(AssertionError, match="at least two ranks"):
        _check(1)


def test_messages_differ_from_one_another() -> None:
    """The check's own data: every (source, destination, index) has other bytes."""
    seen = {testing._message(src, dst, i, 16).tobytes() for src in range(4) for dst in range(4) for i in range(8)}
    assert len(seen) == 4 * 4 * 8
    assert np.array_equal(testing._message(1, 2, 3, 5), testing._message(1, 2, 3, 16)[:5])
