# SPDX-License-Identifier: Apache-2.0
"""The calling thread's floating-point environment, set to IEEE 754's defaults for the length of a block.

A caller may have asked its thread to flush subnormals to zero (``torch.set_flush_denormal``) or to round
another way. That must not reach our sums, and ours must not reach the caller. Knows nothing of folds.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_FENV_BYTES = 128
"""Room for a ``fenv_t``: 32 bytes on x86-64, 8 on AArch64, at most 104 with the C libraries of Linux."""

_FE_DFL_ENV = ctypes.c_void_p(-1)
"""``FE_DFL_ENV`` of glibc and musl. It clears x86's flush-to-zero and denormals-are-zero bits too."""


@cache
def _libm() -> ctypes.CDLL:
    process = ctypes.CDLL(None)
    return process if hasattr(process, "fesetenv") else ctypes.CDLL("libm.so.6")


@contextmanager
def default_float_environment() -> Iterator[None]:
    """Round to nearest even, keep subnormals, trap nothing; the thread's own settings come back after."""
    libm = _libm()
    saved = ctypes.create_string_buffer(_FENV_BYTES)
    libm.fegetenv(saved)
    libm.fesetenv(_FE_DFL_ENV)  # bits: subnormals are kept, whatever the caller's thread has set
    try:
        yield
    finally:
        libm.fesetenv(saved)
