# SPDX-License-Identifier: Apache-2.0
"""What must hold outside communication for equal bits: cuBLAS, TransformerEngine's kernels, torch's own algorithms.

The same requirements as those of Megatron's ``--deterministic-mode``. ``NCCL_ALGO`` is not among them: no sum of ours
depends on it. Knows nothing of groups.
"""

from collections.abc import MutableMapping

import torch

from detcomm.errors import UsageError

REQUIRED = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Variables and the values under which kernels are deterministic; the first is set where there is none."""

IF_SET = {
    "MAMBA_DETERMINISTIC": "1",
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
}
"""Variables that follow torch's switch where they are absent, and that override it where they are set."""


def require_deterministic_kernels(environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Set what is absent, refuse what contradicts, and switch torch to deterministic algorithms.

    cuBLAS and TransformerEngine read their variables when they are first used: call this before.

    Returns:
        What was set, as ``NAME=value``.

    Raises:
        UsageError: a variable has another value; nothing has been changed then.
    """
    findings = contradictions(environ)
    if findings:
        raise UsageError(f"environment: {'; '.join(findings)}")
    added = tuple(f"{name}={values[0]}" for name, values in REQUIRED.items() if not environ.get(name))
    for name, values in REQUIRED.items():
        if not environ.get(name):
            environ[name] = values[0]
    torch.use_deterministic_algorithms(True)
    return added


def contradictions(environ: MutableMapping[str, str]) -> list[str]:
    """The variables that allow kernels whose bits differ from run to run, with what is expected."""
    found = []
    for name, values in REQUIRED.items():
        value = environ.get(name)
        if value and value not in values:
            found.append(f"{name}: expected {' or '.join(values)}, got {value!r}")
    for name, start in IF_SET.items():
        value = environ.get(name)
        if value and not value.startswith(start):
            found.append(f"{name}: expected {start}, or nothing, got {value!r}")
    return found
