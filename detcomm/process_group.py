# SPDX-License-Identifier: Apache-2.0
"""The form of the backend that every torch takes: a Python subclass of ``dist.ProcessGroup``.

Holds what torch asks of a group beside collectives: names, devices, splitting. C++ callers (DDP's Reducer, the
functional collectives) reach the methods through torch's own trampoline.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

from detcomm.errors import UnsupportedError, UsageError
from detcomm.group import Group
from detcomm.mem_pool_methods import MemPoolMethods
from detcomm.options import Options
from detcomm.torch_methods import TorchMethods

BACKEND_NAME = "detcomm"


class DeviceBackend:
    """What torch asks of the backend behind one device of a group."""

    supports_coalescing = False
    """Whether torch should gather a list of sends and receives in a block: gloo needs none."""
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, group: "ProcessGroup") -> None:
        self._process_group = group

    @property
    def options(self) -> Options:
        return self._process_group.options

    def name(self) -> str:
        return BACKEND_NAME

    def rank(self) -> int:
        return self._process_group.rank()

    def size(self) -> int:
        return self._process_group.size()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether FSDP may ask for its buffers here: ranks would have to share each of them when it is made."""
        return False

    def abort(self) -> None:
        self._process_group.abort()

    def shutdown(self) -> None:
        self._process_group.shutdown()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._process_group.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._process_group._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        """See ``TorchMethods``."""


_NAMED_BY_SPLITS: Any = C10dBackend if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else object
"""What torch 2.14 wants a group to be split from, by type; before, Python could not make one."""


class CudaDeviceBackend(DeviceBackend, MemPoolMethods, _NAMED_BY_SPLITS):  # type: ignore[misc]
    """The same for CUDA: stock NCCL must get a list of sends and receives in a block.

    Groups that know their device are split: so does torch's device mesh where ``init_process_group`` got a device_id.
    """

    supports_coalescing = True
    supports_splitting = True

    def __init__(self, group: "ProcessGroup") -> None:
        if _NAMED_BY_SPLITS is not object:
            _NAMED_BY_SPLITS.__init__(self, group.rank(), group.size())
        DeviceBackend.__init__(self, group)
        self._group = group._group

    def perform_nocolor_split(self, device: torch.device) -> None:
        """What NCCL needs of ranks that are not in a new group; nothing here."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing: what carries CUDA tensors is connected by the first of them."""


def _ended(*_: Any) -> Any:
    raise UsageError("split_group: the group has been destroyed")


class ProcessGroup(TorchMethods, dist.ProcessGroup):  # type: ignore[misc]
    """A group of ranks whose reductions have a specified order of additions.

    Args:
        store: of this group.
        make_subgroup: makes a group from name, rank, size, timeout and options, for ``split_group``.
    """

    def __init__(
        self, store: Any, group: Group, make_subgroup: Callable[[str, int, int, timedelta, Any], "ProcessGroup"]
    ) -> None:
        # The constructor for Python subclasses; the one with a store makes none, and the stubs do not tell.
        dist.ProcessGroup.__init__(self, group.rank, group.world_size)  # type: ignore[call-arg]
        self._group = group
        self._store = store
        self._name = group.name
        self._desc = "undefined"
        self._make_subgroup = make_subgroup
        self._backend = DeviceBackend(self)
        self._cuda_backend = CudaDeviceBackend(self)

    def shutdown(self) -> None:
        super().shutdown()
        # Not with the last reference to this group, which is part of a cycle: the store's server is to end at once.
        self._store = None
        self._make_subgroup = _ended

    @property
    def options(self) -> Options:
        """The options that the ranks have agreed on."""
        return self._group.options

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def name(self) -> str:
        return BACKEND_NAME

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.version.cuda is not None else [])

    def _get_backend(self, device: Any) -> Any:
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"group {self._name}: no backend for {device}; expected cpu or cuda")
        return self._backend if device.type == "cpu" else self._cuda_backend

    def _start_coalescing(self, device: Any = None) -> None:
        self._group.open_block()

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        return self._group.close_block()

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ProcessGroup | None":
        """A group of some of these ranks, in the order given; ``None`` on the others. Its members alone need to call.

        Raises:
            UsageError: ranks that are not in this group, or twice.
        """
        ranks = list(new_ranks)
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self._group.world_size for rank in ranks):
            raise UsageError(f"split_group: expected distinct ranks below {self._group.world_size}, got {ranks}")
        if self._group.rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{'-'.join(map(str, ranks))}"
        limit = timeout or timedelta(seconds=self._group.timeout_s)
        options = self.options if opts is None else opts
        group = self._make_subgroup(name, ranks.index(self._group.rank), len(ranks), limit, options)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group
