# SPDX-License-Identifier: Apache-2.0
"""Groups of one backend under the name of another, in torch's Python side alone."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install(alias: str, backend: str) -> None:
    """From now on, in this process: groups asked for as ``alias`` are made by ``backend`` and reported as ``alias``."""
    make_default, make_group = dist.init_process_group, distributed_c10d._new_process_group_helper

    @functools.wraps(make_default)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given, renamed = _translated(make_default, args, kwargs, alias, backend)
        make_default(*given.args, **given.kwargs)
        if renamed:
            _rename(distributed_c10d._get_default_group(), alias)

    @functools.wraps(make_group)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        given, renamed = _translated(make_group, args, kwargs, alias, backend)
        made = make_group(*given.args, **given.kwargs)
        group = made[0]
        if renamed and isinstance(group, dist.ProcessGroup):
            _rename(group, alias)
        return made

    dist.init_process_group = init_process_group
    distributed_c10d.init_process_group = init_process_group
    distributed_c10d._new_process_group_helper = new_process_group


def _translated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], alias: str, backend: str
) -> tuple[inspect.BoundArguments, bool]:
    given = inspect.signature(function).bind(*args, **kwargs)
    renamed = given.arguments.get("backend") == alias
    if renamed:
        given.arguments["backend"] = backend
    return given, renamed


def _rename(group: Any, alias: str) -> None:
    _, store = distributed_c10d._world.pg_map[group]
    distributed_c10d._world.pg_map[group] = (dist.Backend(alias), store)
