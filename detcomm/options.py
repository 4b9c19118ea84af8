# SPDX-License-Identifier: Apache-2.0
"""Options of a group: the contract fields, then what is speed only. Read from the environment once, at the edge."""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Self

import attrs

from detcomm.association import DEFAULT_RING_CHUNK_ELEMS, NAMES, Association
from detcomm.collectives import Accumulate
from detcomm.errors import UsageError

TRANSPORTS = ("auto", "shared_memory", "gloo", "mpi", "hybrid", "hybrid_mpi", "nccl")
ENV_PREFIX = "DETCOMM_"


def _one_of(*allowed: str) -> Callable[[Any, "attrs.Attribute[str]", str], None]:
    def check(_: Any, field: "attrs.Attribute[str]", value: str) -> None:
        if value not in allowed:
            raise UsageError(f"option {field.name}: expected one of {', '.join(allowed)}, got {value!r}")

    return check


def _at_least(least: int) -> Callable[[Any, "attrs.Attribute[Any]", Any], None]:
    def check(_: Any, field: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UsageError(f"option {field.name}: expected a whole number of at least {least}, got {value!r}")

    return check


def _to_timeout(value: Any) -> timedelta | None:
    if value is None or isinstance(value, timedelta):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return timedelta(seconds=value)
    raise UsageError(f"option timeout: expected seconds above zero or a timedelta, got {value!r}")


@attrs.frozen(kw_only=True)
class Options:
    """Options of one process group; must be equal on all its ranks.

    Args:
        association: ``tree`` (default), ``linear`` or ``ring``: the order of additions. Contract.
        ring_chunk_elems: elements of one fixed chunk of ``ring``. Contract, for ``ring`` alone.
        accumulate: ``float32`` (default): 16-bit types are summed in float32 and rounded once; ``wire``: rounded to
            the tensor's type at each addition. Contract.
        schedule: ``auto`` (default) or a schedule's text: ``oneshot``, ``direct``, ``halving``, ``hierarchical``,
            ``staged(8,32)``, ``binomial``, ``ring``. Speed only.
        chunk_bytes: bytes of one pipelined piece of a message; default: chosen by size. Speed only.
        node_size: ranks of one aligned block that share a host; default: derived from the hosts. Speed only.
        transport: ``auto`` (default), ``shared_memory``, ``gloo``, ``mpi``, ``hybrid`` (shared memory inside a host,
            gloo between), ``hybrid_mpi`` (the same with MPI between) or ``nccl``. Speed only.
        scratch_bytes: bound of a group's scratch on a GPU, 64 MiB by default. Speed only.
        cuda_on_error: ``exit`` (default): a group that fails with work on the GPU ends the process, as stock NCCL does,
            since the stream would run on with garbage; ``raise``: only the next call raises.
        cuda_agreement: ``on``: the ranks agree on each call of CUDA tensors before it is issued, as they always do for
            CPU tensors; costs a round trip of the host. ``off`` (default): calls that differ are found by a timeout,
            or, where all sizes fit, not at all.
        cuda_path: ``native`` (default), or ``reference``: the same plans from Python through a stock NCCL group, to
            compare with; slower, the same bits.
        cuda_transport: ``auto`` (default): ranks of a host read each other's memory if all can, otherwise NCCL, which
            the log says with the reason; ``peer``: an error where they cannot; ``nccl``. Between hosts it is always
            NCCL. Speed only.
        timeout: how long a rank waits for its peers; default: the group's timeout in torch.

    Raises:
        UsageError: naming the field, what is expected and what was given.
    """

    association: str = attrs.field(default="tree", validator=_one_of(*NAMES))
    ring_chunk_elems: int = attrs.field(default=DEFAULT_RING_CHUNK_ELEMS, validator=_at_least(1))
    accumulate: Accumulate = attrs.field(default="float32", validator=_one_of("float32", "wire"))
    schedule: str = attrs.field(default="auto", validator=attrs.validators.instance_of(str))
    chunk_bytes: int | None = attrs.field(default=None, validator=_at_least(64))
    node_size: int | None = attrs.field(default=None, validator=_at_least(1))
    transport: str = attrs.field(default="auto", validator=_one_of(*TRANSPORTS))
    scratch_bytes: int = attrs.field(default=64 << 20, validator=_at_least(1 << 20))
    cuda_on_error: str = attrs.field(default="exit", validator=_one_of("exit", "raise"))
    cuda_agreement: str = attrs.field(default="off", validator=_one_of("off", "on"))
    cuda_path: str = attrs.field(default="native", validator=_one_of("native", "reference"))
    cuda_transport: str = attrs.field(default="auto", validator=_one_of("auto", "peer", "nccl"))
    timeout: timedelta | None = attrs.field(default=None, converter=_to_timeout)

    @property
    def order(self) -> Association:
        """The association as a value."""
        return Association(self.association, self.ring_chunk_elems)

    @property
    def numerics_id(self) -> str:
        """The name of the bits: ``tree/1:float32``."""
        return self.order.numerics_id(self.accumulate)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Options from ``DETCOMM_<FIELD>`` variables, ``overrides`` first.

        Raises:
            UsageError: if a variable does not parse, naming it.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in attrs.fields(cls):
            text = environ.get(ENV_PREFIX + field.name.upper())
            if text is not None and text != "":
                values[field.name] = _parse(field.name, text)
        return cls(**(values | overrides))


_NUMBERS: dict[str, Callable[[str], float]] = {
    "ring_chunk_elems": int,
    "chunk_bytes": int,
    "node_size": int,
    "scratch_bytes": int,
    "timeout": float,
}


def _parse(name: str, text: str) -> Any:
    parse = _NUMBERS.get(name)
    if parse is None:
        return text
    try:
        return parse(text)
    except ValueError:
        raise UsageError(f"{ENV_PREFIX}{name.upper()}: expected a number, got {text!r}") from None
