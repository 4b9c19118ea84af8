# SPDX-License-Identifier: Apache-2.0
"""The reductions of any library, as bytes in and bytes out: what ``verify`` and ``probe`` examine."""

from collections.abc import Sequence

from detcomm.errors import UsageError
from detcomm.reducers.base import Examined, Reducer

__all__ = ["Examined", "Reducer", "check_can_examine", "examine"]


def examine(backend: str, device: str = "cpu", imports: Sequence[str] = ()) -> Examined:
    """The library to examine. Every rank calls this, with equal arguments.

    Args:
        backend: a backend of torch.distributed by its name, or ``mpi`` for MPI itself.
        device: ``cpu`` or ``cuda``: where the tensors lie.
        imports: modules to import first, which register a backend.

    Raises:
        UsageError: no such backend, device or module, or what it needs is not installed.
    """
    if backend == "mpi":
        check_can_examine(backend, device, imports)
        from detcomm.reducers.over_mpi import MpiExamined

        return MpiExamined()
    from detcomm.reducers.over_torch import TorchExamined

    return TorchExamined(backend, device, imports)


def check_can_examine(backend: str, device: str = "cpu", imports: Sequence[str] = ()) -> None:
    """Refuse what ``examine`` would, as far as one process can know it, before ranks are started.

    Raises:
        UsageError: see ``examine``.
    """
    if backend == "mpi":
        if device != "cpu":
            raise UsageError(f"--device: MPI is examined on cpu, got {device!r}")
        return
    try:
        from detcomm.reducers.over_torch import check_backend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError("this command needs torch: pip install torch") from None
    check_backend(backend, device, imports)
