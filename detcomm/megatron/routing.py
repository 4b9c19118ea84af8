# SPDX-License-Identifier: Apache-2.0
"""Makes each of Megatron's groups with the backend that the policy chooses for its description.

Stands in for ``megatron.core.parallel_state.create_group``, through which all of Megatron's groups are made. A backend
that Megatron names itself (gloo for checkpoints) is left alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from detcomm.megatron.inventory import traffic_of
from detcomm.megatron.policy import STOCK, Choice, Policy
from detcomm.megatron.switched_group import SWITCHED_BACKEND_NAME
from detcomm.options import Options
from detcomm.process_group import BACKEND_NAME

MODULE, FUNCTION = "megatron.core.parallel_state", "create_group"

POLICY, MEGATRON = "policy", "Megatron"
"""Who chose a group's backend."""


@attrs.define
class MadeGroups:
    """The groups of one description on all ranks: each rank sees the making of every group.

    Args:
        numerics_id: ``"stock"`` where no order is specified.
    """

    numerics_id: str
    sizes: set[int] = attrs.field(factory=set)


@attrs.frozen
class RoutedGroup:
    """One group and what was decided about it.

    Args:
        backend: as it was given to torch.
        options: of a fixed-order group; ``None`` elsewhere.
        ignored: options for NCCL that Megatron gave and a fixed-order group does not use.
        chosen_by: ``policy``, or ``Megatron`` where it named the backend itself.
    """

    description: str
    ranks: tuple[int, ...]
    backend: str
    options: Options | None
    group: Any
    chosen_by: str = POLICY
    ignored: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether a known release of Megatron makes such groups."""
        return traffic_of(self.description) is not None


def fixed_backend(switched: bool) -> str:
    """The backend string of fixed-order groups: on GPUs CPU tensors stay with gloo, as Megatron wants it.

    Args:
        switched: whether the groups can go over to the stock library between steps.
    """
    name = SWITCHED_BACKEND_NAME if switched else BACKEND_NAME
    return f"cpu:gloo,cuda:{name}" if torch.cuda.is_available() else name


def stock_backend() -> str:
    """The backend that Megatron would take by itself."""
    return "nccl" if torch.cuda.is_available() else "gloo"


class Router:
    """Decides about groups and remembers what was decided.

    Args:
        options: of fixed-order groups whose rule names none.
        switched: whether they can go over to the stock library between steps.
    """

    def __init__(self, policy: Policy, options: Options, switched: bool = False) -> None:
        self.policy = policy
        self.options = options
        self._switched = switched
        self.groups: list[RoutedGroup] = []
        """The groups that this rank is in."""
        self.made: dict[str, MadeGroups] = {}
        """All groups by description, but those whose backend Megatron names itself."""

    def switched_groups(self) -> list[Any]:
        """Those that this rank is in, in the order in which they were made."""
        return [routed.group for routed in self.groups if hasattr(routed.group, "fixed_order")]

    def record(self, group: RoutedGroup) -> None:
        """Remember a group that has been made; on all ranks."""
        if group.chosen_by == POLICY:
            numerics_id = STOCK if group.options is None else group.options.numerics_id
            self.made.setdefault(group.description, MadeGroups(numerics_id)).sizes.add(len(group.ranks))
        if dist.get_rank() in group.ranks:
            self.groups.append(group)

    def backend_and_options(self, choice: Choice) -> tuple[str, Options | None]:
        """What to give torch; ``None`` for options means a stock group."""
        if choice == STOCK:
            return stock_backend(), None
        return fixed_backend(self._switched), choice if isinstance(choice, Options) else self.options

    def replacing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``create_group`` with the backend chosen by the policy."""

        def create_group(
            ranks: Sequence[int] | None = None,
            timeout: Any = None,
            backend: str | None = None,
            pg_options: Any = None,
            use_local_synchronization: bool = False,
            group_desc: str | None = None,
        ) -> Any:
            options: Options | None = None
            ignored: tuple[str, ...] = ()
            named_by_megatron = backend is not None
            if backend is None:
                backend, options = self.backend_and_options(self.policy.choose(group_desc))
                if options is not None:
                    ignored, pg_options = _settings_for_nccl(pg_options), options
            group = original(
                ranks=ranks,
                timeout=timeout,
                backend=backend,
                pg_options=pg_options,
                use_local_synchronization=use_local_synchronization,
                group_desc=group_desc,
            )
            members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
            chosen_by = MEGATRON if named_by_megatron else POLICY
            self.record(RoutedGroup(group_desc or "undescribed", members, backend, options, group, chosen_by, ignored))
            return group

        return create_group


def _settings_for_nccl(pg_options: Any) -> tuple[str, ...]:
    """What options for NCCL ask for beyond its defaults, as text."""
    if pg_options is None:
        return ()
    found = ["is_high_priority_stream"] if getattr(pg_options, "is_high_priority_stream", False) else []
    config = getattr(pg_options, "config", None)
    undefined = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
    for name in ("cga_cluster_size", "min_ctas", "max_ctas"):
        value = getattr(config, name, undefined)
        if value != undefined:
            found.append(f"{name}={value}")
    if net_name := getattr(config, "net_name", None):
        found.append(f"net_name={net_name}")
    return tuple(found)
