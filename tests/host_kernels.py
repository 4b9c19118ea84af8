# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels' sources compiled for the host, with the host's ``device.cuh``."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from detcomm.cuda import compile as cuda_compile
from detcomm.cuda.kernels import fold_defines
from detcomm.cuda.libraries import nvrtc
from detcomm.errors import NativeError
from detcomm.fold_spec import FoldSpec

COMPILER = shutil.which("g++") or shutil.which("c++")
_DEVICE = Path(__file__).parent / "cuda_host" / "device.cuh"
_FLAGS = (
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-Wno-psabi", "-pthread"),
)

_SYNC_DRIVER = """
#include "peer_sync.cu"
extern "C" void run_sync(const Sync* sync) {
  const Pad* own = sync->pads[sync->index];
  if (load_relaxed(&own->dead) != 0) return;
  for (u32 k = 0; k < sync->num_signals; ++k) tell(*sync, k);
  for (u32 k = 0; k < sync->num_signals; ++k) wait(*sync, k);
}
extern "C" u64 size_of_pad() { return sizeof(Pad); }
extern "C" u64 offset_of_resolved() { return __builtin_offsetof(Pad, resolved); }
extern "C" u64 size_of_sync() { return sizeof(Sync); }
"""


def build(folder: Path, text: str, *more_flags: str) -> ctypes.CDLL:
    """Compile a translation unit for the host and load it."""
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(f'#include "device.cuh"\n{text}')
    for name, content in cuda_compile.sources().items():
        if name != "device.cuh":
            (folder / name).write_text(content)
    (folder / "device.cuh").write_text(_DEVICE.read_text())
    command = [str(COMPILER), *_FLAGS, *more_flags, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "_Float16" in done.stderr:
        pytest.skip("this compiler has no _Float16")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


_FUSED_DRIVER = """
#include "peer_fused.cu"
constexpr u32 kThreads = 24;
template <class Each>
static bool all(Here here, Each each) {
  bool all_true = true;
  for (here.thread = 0; here.thread < kThreads; ++here.thread) all_true &= each(here);
  return all_true;
}
static bool round(const Fused& fused, const Here& here) {
  all(here, [&](const Here& at) { tell_ready(fused, at); return true; });
  return all(here, [&](const Here& at) { return await_ready(fused, at); });
}
static void run_block(const Fused& fused, const Here& here) {
  if (!all(here, [&](const Here& at) { return is_free(fused, at); })) return;
  all(here, [&](const Here& at) { stage(fused, at); return true; });
  if (!round(fused, here)) return;
  all(here, [&](const Here& at) { reduce(fused, at); return true; });
  if (fused.num_rounds == 2 && !round(fused, here)) return;
  all(here, [&](const Here& at) { fetch(fused, at); return true; });
  all(here, [&](const Here& at) { tell_done(fused, at); return true; });
}
extern "C" void run_fused(const Fused* fused, u32 num_blocks) {
  for (u32 block = 0; block < num_blocks; ++block) run_block(*fused, {block, num_blocks, 0, kThreads});
}
"""


@cache
def fused(spec: FoldSpec | None) -> Any:
    """``peer_fused.cu`` for a fold: called with the address of its parameter and its blocks.

    These take turns: block b waits for the peers' block b alone, so on all ranks the first one comes first.
    """
    defines = "" if spec is None else "".join(f"#define {name} {value}\n" for name, value in fold_defines(spec).items())
    folder = Path(tempfile.mkdtemp(prefix="detcomm-host-kernels-"))
    try:
        function = build(folder, defines + _FUSED_DRIVER).run_fused
    finally:
        shutil.rmtree(folder)
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    function.restype = None
    return function


@cache
def sync_library() -> ctypes.CDLL:
    """``peer_sync.cu``, once a process. Its one block's threads take turns: all tell, then all wait."""
    folder = Path(tempfile.mkdtemp(prefix="detcomm-host-kernels-"))
    try:
        return build(folder, _SYNC_DRIVER)
    finally:
        shutil.rmtree(folder)


def sync() -> Any:
    """The kernel, called with the address of its parameter."""
    function = sync_library().run_sync
    function.argtypes = (ctypes.c_void_p,)
    function.restype = None
    return function


def has_nvrtc() -> bool:
    """Whether kernels can be compiled for a GPU here."""
    try:
        nvrtc()
    except NativeError:
        return False
    return True
