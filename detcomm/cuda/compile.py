# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ of ``native/kernels/`` to machine code, by NVRTC with exactly our flags, kept on disk.

Needs no GPU. Not through CuPy: its modules append flags of their own, ``-ftz=true`` among them.
"""

import contextlib
import ctypes
import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import detcomm
from detcomm.cuda.libraries import Library, nvrtc
from detcomm.errors import NativeError

# bits: no flush to zero, no contraction to FMA, IEEE division
FLAGS = ("--std=c++17", "-ftz=false", "-fmad=false", "-prec-div=true", "-prec-sqrt=true")

CACHE_VARIABLE = "DETCOMM_CACHE"
"""Folder for compiled kernels; default ``~/.cache/detcomm``. Empty: keep none."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One translation unit.

    Attributes:
        cubin: machine code, what is loaded.
        ptx: the assembly that it was made from in the same compilation; to read.
    """

    cubin: bytes
    ptx: str


def compile_kernel(file: str, defines: dict[str, str], architecture: str) -> bytes:
    """Machine code of one kernel source.

    Args:
        file: in ``native/kernels/``.
        defines: macros, by name.
        architecture: ``sm_90``.

    Raises:
        NativeError: no NVRTC, or it does not compile.
    """
    text = "".join(f"#define {name} {value}\n" for name, value in sorted(defines.items())) + f'#include "{file}"\n'
    cached = _cached_file(text, architecture)
    if cached is not None:
        with contextlib.suppress(OSError):
            return cached.read_bytes()
    cubin = compile_text(text, architecture).cubin
    if cached is not None:
        _write(cached, cubin)
    return cubin


def compile_text(text: str, architecture: str) -> Compiled:
    """Compile a translation unit that includes the kernels' files; nothing is cached."""
    compiler = nvrtc()
    names = [name.encode() for name in sources()]
    contents = [content.encode() for content in sources().values()]
    program = ctypes.c_void_p()
    compiler.call(
        "nvrtcCreateProgram",
        ctypes.byref(program),
        text.encode(),
        b"detcomm.cu",
        len(names),
        (ctypes.c_char_p * len(names))(*contents),
        (ctypes.c_char_p * len(names))(*names),
    )
    try:
        options = [flag.encode() for flag in (*FLAGS, f"--gpu-architecture={architecture}")]
        if compiler["nvrtcCompileProgram"](program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = _read(compiler, program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
            raise NativeError(f"NVRTC does not compile for {architecture}:\n{log}")
        ptx = _read(compiler, program, "PTX").decode().rstrip("\0")
        return Compiled(_read(compiler, program, "CUBIN"), ptx)
    finally:
        compiler.call("nvrtcDestroyProgram", ctypes.byref(program))


@cache
def sources() -> dict[str, str]:
    """The kernels' files by name: those beside an editable package, else those installed in it."""
    places = [Path(__file__).parents[2] / "native" / "kernels"]
    places += [Path(place) / "kernels" for place in detcomm.__path__]
    for place in places:
        files = sorted([*place.glob("*.cu"), *place.glob("*.cuh")])
        if files:
            return {file.name: file.read_text() for file in files}
    raise NativeError(f"the sources of the GPU kernels are not in {' or '.join(map(str, places))}; reinstall detcomm")


def _read(compiler: Library, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    compiler.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    compiler.call(f"nvrtcGet{what}", program, data)
    return data.raw


def _cached_file(text: str, architecture: str) -> Path | None:
    given = os.environ.get(CACHE_VARIABLE)
    if given == "":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else home / "detcomm"
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    told = [text, architecture, f"{major.value}.{minor.value}", *FLAGS]
    told += [part for name, content in sources().items() for part in (name, content)]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()
    return folder / f"{key}.cubin"


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, whoever else writes the same; a folder that cannot be written costs only time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
