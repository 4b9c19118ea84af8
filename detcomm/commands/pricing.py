# SPDX-License-Identifier: Apache-2.0
"""The part of ``detcomm plan`` that prices: against NCCL's ring, over message sizes and over world sizes."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from detcomm.collectives import Accumulate, DType
from detcomm.errors import UsageError
from detcomm.pricing import MACHINES, Machine, Price, candidates, price, ring_price
from detcomm.pricing.loads import Message
from detcomm.schedule import Schedule

WORLD_SIZES = tuple(8 << power for power in range(12))
"""8 to 16,384 ranks."""

MESSAGE_BYTES = tuple(1 << power for power in (14, 17, 20, 23, 26, 28, 30, 32))


def find_machine(name: str, node_size: int) -> Machine:
    """The preset of this name.

    Args:
        node_size: ranks of a host, or 1 for the preset's own.

    Raises:
        UsageError: there is none, or hosts of that many ranks are not what its numbers are for.
    """
    if name not in MACHINES:
        raise UsageError(f"--model: expected one of {', '.join(MACHINES)}, got {name!r}")
    machine = MACHINES[name]
    if node_size not in (1, machine.node_size):
        raise UsageError(f"--model {name}: hosts have {machine.node_size} ranks, --node-size says {node_size}")
    return machine


def best_price(message: Message, world_size: int, machine: Machine) -> Price:
    """The cheapest schedule of ``tree``."""
    schedules = candidates(world_size, machine.node_size)
    return min((price(schedule, message, world_size, machine) for schedule in schedules), key=lambda one: one.time_us)


def print_prices(
    console: Console, machine: Machine, world: int, num_bytes: int, dtype: DType, mode: Accumulate, chosen: Schedule
) -> list[dict[str, Any]]:
    """Two tables: this world over message sizes, and this message over world sizes.

    Returns:
        Their rows, as plain data.
    """
    own = Message.of(num_bytes, dtype, mode)
    console.print(f"\n[bold]estimated[/bold] on {machine.name}; all-reduce of {dtype.value}, tree, {mode}")
    if chosen.text != "ring":
        told = price(chosen, own, world, machine)
        console.print(f"{chosen.text}: {time_text(told.time_us)}, {told.num_steps} steps, in {told.num_pieces} pieces")
    by_size = Table("message", "ring", "best of tree", "schedule", "pieces", "ratio", title=f"{world:,} ranks")
    for size in MESSAGE_BYTES:
        by_size.add_row(size_text(size), *_row(Message.of(size, dtype, mode), world, machine))
    console.print(by_size)
    by_world = Table("ranks", "ring", "best of tree", "schedule", "pieces", "ratio", title=size_text(num_bytes))
    for ranks in WORLD_SIZES:
        by_world.add_row(f"{ranks:,}", *_row(own, ranks, machine))
    console.print(by_world)
    console.print("ring: NCCL's, by its own formula, which rounds 16-bit types at each hop")
    wanted = [(world, size) for size in MESSAGE_BYTES] + [(ranks, num_bytes) for ranks in WORLD_SIZES]
    return [_plain(Message.of(size, dtype, mode), ranks, machine) for ranks, size in wanted]


def plot_prices(path: Path, machine: Machine, dtype: DType, mode: Accumulate) -> None:
    """Ratio to the ring over world sizes, one line a message size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    for index, size in enumerate((1 << 17, 1 << 20, 1 << 23, 1 << 26, 1 << 30)):
        message = Message.of(size, dtype, mode)
        best = [best_price(message, ranks, machine).time_us for ranks in WORLD_SIZES]
        ring = [ring_price(message, ranks, machine).time_us for ranks in WORLD_SIZES]
        color = f"C{index}"
        times.plot(WORLD_SIZES, best, color=color, marker="o", markersize=3, label=size_text(size))
        times.plot(WORLD_SIZES, ring, color=color, linestyle="--", linewidth=1)
        ratio = [mine / theirs for mine, theirs in zip(best, ring, strict=True)]
        ratios.plot(WORLD_SIZES, ratio, color=color, marker="o", markersize=3, label=size_text(size))
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="us", title="tree (solid), NCCL's ring (dashed)")
    ratios.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time of tree / time of ring", title="ratio")
    ratios.axhline(1.0, color="black", linewidth=0.8)
    for axis in (times, ratios):
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    times.legend(fontsize=8)
    figure.suptitle(f"all-reduce of {dtype.value}, estimated on {machine.name}", fontsize=10)
    figure.savefig(path)


def _plain(message: Message, world: int, machine: Machine) -> dict[str, Any]:
    ring, best = ring_price(message, world, machine), best_price(message, world, machine)
    return {
        "world_size": world,
        "bytes": int(message.num_bytes),
        "ring_us": round(ring.time_us, 2),
        "tree_us": round(best.time_us, 2),
        "schedule": best.schedule,
        "pieces": best.num_pieces,
    }


def _row(message: Message, world: int, machine: Machine) -> tuple[str, ...]:
    ring, best = ring_price(message, world, machine), best_price(message, world, machine)
    ratio = best.time_us / ring.time_us
    return time_text(ring.time_us), time_text(best.time_us), best.schedule, str(best.num_pieces), f"{ratio:.2f}"


def time_text(time_us: float) -> str:
    """A time for people: microseconds, or milliseconds from ten on."""
    return f"{time_us:,.0f} us" if time_us < 10_000 else f"{time_us / 1000:,.1f} ms"


def size_text(num_bytes: int) -> str:
    """A number of bytes for people."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):g} {unit}"
    return f"{num_bytes} B"
