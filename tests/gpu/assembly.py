# SPDX-License-Identifier: Apache-2.0
"""The machine code of the fold kernel as NVRTC makes it, and as nvcc does: what its float instructions are.

Read with cuobjdump. A fused multiply-add or a flush to zero in a sum would be other bits.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda import compile as cuda_compile
from detcomm.cuda.kernels import fold_defines
from detcomm.fold_spec import FoldSpec

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SUMS = (("float32", 8), ("float64", 3), ("bfloat16", 2))
"""A sum needs additions alone; a division is a sequence with FMAs of its own, rounded as IEEE 754 says."""

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)

_FUSES = re.compile(r"[FD]FMA")
_FLUSHES = re.compile(r"[FDH](ADD|MUL|FMA)\w*\..*FTZ")


def wrong_instructions(machine_code: str) -> list[str]:
    """Of a disassembled sum: those that fuse or flush.

    Other instructions on floats serve indices and constants: conversions of a loop's length, HFMA2 as a move.
    """
    names = set(_INSTRUCTION.findall(machine_code))
    assert names & {"FADD", "DADD"}, f"no addition among {sorted(names)}"
    return sorted(name for name in names if _FUSES.match(name) or _FLUSHES.match(name))


def sums(compilers: tuple[str, ...], kinds: tuple[tuple[str, int], ...] = SUMS) -> Iterator[tuple[str, str]]:
    """Machine code of sums by compiler, architecture and type."""
    for architecture in ARCHITECTURES:
        for dtype, num_inputs in kinds:
            spec = FoldSpec(ReduceOp.SUM, DType(dtype), "float32", "tree", (True,) * num_inputs, True, num_inputs)
            defines = "".join(f"#define {name} {value}\n" for name, value in fold_defines(spec).items())
            text = f'{defines}#include "fold.cu"\n'
            for compiler in compilers:
                cubin = _by_nvcc(text, architecture) if compiler == "nvcc" else _by_nvrtc(text, architecture)
                yield f"{compiler} {architecture} {num_inputs} x {dtype}", disassembled(cubin)


def check() -> str:
    """All of them; with nvcc where there is one."""
    compilers = ("NVRTC", "nvcc") if shutil.which("nvcc") else ("NVRTC",)
    num_read = 0
    for name, machine_code in sums(compilers):
        wrong = wrong_instructions(machine_code)
        assert not wrong, f"{name}: {wrong}"
        num_read += 1
    return f"{num_read} sums by {' and '.join(compilers)} for {', '.join(ARCHITECTURES)}: no FMA, no flush to zero"


def cuobjdump() -> str | None:
    """Of a toolkit, or of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    packaged = [str(path) for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin")]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *packaged]))


def disassembled(cubin: bytes) -> str:
    """SASS."""
    tool = cuobjdump()
    assert tool is not None, "no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    environment = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _by_nvrtc(text: str, architecture: str) -> bytes:
    return cuda_compile.compile_text(text, architecture).cubin


def _by_nvcc(text: str, architecture: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in cuda_compile.sources().items():
            Path(folder, name).write_text(content)
        Path(folder, "unit.cu").write_text(text)
        command = ["nvcc", "-cubin", f"-arch={architecture}", *cuda_compile.FLAGS, "-o", "unit.cubin", "unit.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return Path(folder, "unit.cubin").read_bytes()


if __name__ == "__main__":
    print(check())
