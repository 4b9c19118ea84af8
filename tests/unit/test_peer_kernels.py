# SPDX-License-Identifier: Apache-2.0
"""The kernels of peers' memory, their logic compiled for the host: where operands are found, who is waited for."""

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda import compile as cuda_compile
from detcomm.cuda import native
from detcomm.cuda.kernels import fold_defines
from detcomm.cuda.peer.path import PAD_BYTES
from detcomm.cuda.peer_memory.regions import MAX_REGIONS
from detcomm.fold_spec import FoldSpec
from tests import host_kernels, inputs, oracle
from tests.fake_peer_kernels import CSource

pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="no C++ compiler here")

_DRIVER = """
extern "C" void run_fold(const Sources* sources, void* output, u64 count, u64 divisor) {
  for (u64 i = 0; i < 24; ++i) {
    position = {i, 24, 0};
    dc_fold(*sources, static_cast<u8*>(output), count, divisor);
  }
}
"""


@pytest.mark.parametrize("offset", [0, 2])
def test_operands_lie_here_staged_or_where_the_peer_left_them(offset: int, tmp_path: Path) -> None:
    spec = FoldSpec(ReduceOp.SUM, DType.BFLOAT16, "float32", "tree", (True,) * 3, True, 3)
    defines = "".join(f"#define {name} {value}\n" for name, value in fold_defines(spec).items())
    function = host_kernels.build(tmp_path, f'{defines}#define DC_PEERS 1\n#include "fold.cu"\n{_DRIVER}').run_fold
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
    given = inputs.make("bfloat16", 1000, 3)
    rooms = [np.zeros(4096, np.uint8) for _ in range(4)]
    starts = [-room.ctypes.data % 16 + offset for room in rooms]
    places = [room[start : start + 2000] for room, start in zip(rooms, starts, strict=True)]
    for place, array in zip(places, given, strict=False):
        place[:] = inputs.bits(array)
    words = np.array([0, places[2].ctypes.data - 48], np.uint64)
    word = words.ctypes.data
    sources = (CSource * 3)(
        CSource(places[0].ctypes.data, 0, 0), CSource(places[1].ctypes.data, word, 7), CSource(1, word + 8, 48)
    )
    function(ctypes.addressof(sources), places[3].ctypes.data, 1000, 3)
    assert np.array_equal(places[3], inputs.bits(oracle.reduce(given, "bfloat16", "sum")))


def test_native_code_and_kernels_agree_on_what_lies_where() -> None:
    library = host_kernels.sync_library()
    for name in ("size_of_pad", "offset_of_resolved", "size_of_sync"):
        getattr(library, name).restype = ctypes.c_uint64
    assert library.size_of_pad() == PAD_BYTES
    header = (Path(__file__).parents[2] / "native" / "cuda" / "peer_parameters.h").read_text()
    assert f"kResolvedOffset = {library.offset_of_resolved()};" in header
    assert library.size_of_sync() == ctypes.sizeof(_Sync)


class _Sync(ctypes.Structure):
    _fields_ = (
        ("pads", ctypes.c_uint64 * native.MAX_PEERS),
        ("table", ctypes.c_uint64),
        ("words", ctypes.c_uint64),
        ("patience_ns", ctypes.c_uint64),
        ("places", ctypes.c_uint64 * 2),
        ("index", ctypes.c_uint32),
        ("num_signals", ctypes.c_uint32),
        ("signals", native.CSignal * native.MAX_PEERS),
    )


class _Rank:
    """A rank with one peer, whose pad the test writes."""

    def __init__(self, patience_s: float, **signal: int) -> None:
        self.pads = [np.zeros(PAD_BYTES // 4, np.uint32) for _ in range(2)]
        self.words = np.zeros(64, np.uint32)
        self.sync = _Sync(patience_ns=int(patience_s * 1e9), index=0, num_signals=1, words=self.words.ctypes.data)
        for index, pad in enumerate(self.pads):
            self.sync.pads[index] = pad.ctypes.data
        self.sync.signals[0] = native.CSignal(**{"peer": 1, "most": -1} | signal)

    def run(self) -> None:
        host_kernels.sync()(ctypes.addressof(self.sync))


READY, DONE, DEAD = 0, 16, 208
"""Words of a pad."""


def test_counts_only_grow_and_wrap() -> None:
    rank = _Rank(30.0, ready=1, awaited=1, done=2)
    own, peer = rank.pads
    own[160:208] = 0xFFFFFFFF  # sent, awaited, consumed: the next is 0
    rank.run()
    assert (peer[READY], peer[DONE], own[DEAD]) == (0, 1, 0)


@pytest.mark.parametrize(("signal", "kind"), [({"awaited": 1}, 1), ({"ready": 1, "most": 0}, 2)])
def test_a_wait_in_vain_is_told_once_and_ends_all(signal: dict[str, int], kind: int) -> None:
    rank = _Rank(0.05, **signal)
    rank.run()
    assert rank.words[1:4].tolist() == [1, 1, kind]
    assert rank.pads[0][DEAD] == 1
    told = rank.pads[1].copy()
    rank.words[:] = 0
    rank.run()
    assert not rank.words.any(), "told a second time"
    assert np.array_equal(rank.pads[1], told), "a rank that has given up tells its peers to go on"


def test_the_host_ends_a_wait() -> None:
    rank = _Rank(600.0, awaited=1)
    rank.words[0] = 1
    rank.run()
    assert rank.pads[0][DEAD] == 1
    assert rank.words[1] == 0


def test_places_are_taken_as_addresses_of_this_process() -> None:
    rank = _Rank(30.0, awaited=1, flags=2)
    table: Any = np.zeros((2, MAX_REGIONS), np.uint64)
    table[1, 9] = 1 << 40
    rank.sync.table = table.ctypes.data
    places: Any = rank.pads[0].view(np.uint64)
    places[16 + 2 : 16 + 4] = [9 << 48 | 4096, 0]
    places[48 + 2 : 48 + 4] = 5
    rank.pads[0][READY + 1] = 1
    rank.run()
    assert places[48 + 2 : 48 + 4].tolist() == [(1 << 40) + 4096, 0]


@pytest.mark.skipif(not host_kernels.has_nvrtc(), reason="no NVRTC here: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("file", ["peer_sync.cu", "peer_fused.cu"])
def test_what_ranks_tell_each_other_is_released_and_acquired_by_the_system(file: str, architecture: str) -> None:
    ptx = cuda_compile.compile_text(f'#include "{file}"\n', architecture).ptx
    assert len(re.findall(r"\bst\.release\.sys\.global\.u32", ptx)) >= 3, "ready, done and the host's error word"
    assert "ld.acquire.sys.global.u32" in ptx
    assert "multimem" not in ptx
