# SPDX-License-Identifier: Apache-2.0
"""``detcomm plan``: what would be added in which order, who would send what, and the proof that they agree."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from detcomm.association import DEFAULT_RING_CHUNK_ELEMS, TREE, Association
from detcomm.call import Call, even_shards
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp, partial_dtype
from detcomm.commands import pricing
from detcomm.commands.output_files import JsonOption, check_can_draw, writable
from detcomm.draw import draw
from detcomm.errors import UsageError
from detcomm.partition import partition
from detcomm.planner import PlanOptions, make_plan, resolve_schedule
from detcomm.pricing.large_worlds import prove_staged
from detcomm.schedule import Schedule, Traffic
from detcomm.schedules import Staged
from detcomm.simulate import Digests, cells, prove_cell

_LARGE_WORLD = 512
"""Beyond this world size a staged schedule is proved stage by stage, since all its cells would take minutes."""

_TABLE_WORLD = 64
"""Beyond this world size the table of bytes shows a few ranks, since each row lowers a plan."""


def plan(
    world: Annotated[int, typer.Option(min=1, help="Ranks of the group.")] = 8,
    collective: Annotated[Collective, typer.Option(help="Which collective.")] = Collective.ALL_REDUCE,
    count: Annotated[int, typer.Option(min=0, help="Elements of the whole message.")] = 1 << 20,
    dtype: Annotated[DType, typer.Option(help="Element type.")] = DType.FLOAT32,
    op: Annotated[ReduceOp, typer.Option(help="Reduction operation.")] = ReduceOp.SUM,
    association: Annotated[str, typer.Option(help="tree, linear or ring.")] = "tree",
    ring_chunk_elems: Annotated[int, typer.Option(help="Fixed chunk of ring.")] = DEFAULT_RING_CHUNK_ELEMS,
    accumulate: Annotated[str, typer.Option(help="float32 or wire.")] = "float32",
    schedule: Annotated[str, typer.Option(help="A schedule's text, or auto.")] = "auto",
    chunk_bytes: Annotated[int | None, typer.Option(min=64, help="Bytes of one piece.")] = None,
    node_size: Annotated[int, typer.Option(min=1, help="Ranks of one aligned block on a host.")] = 1,
    root: Annotated[int, typer.Option(min=0, help="Receiver of a reduce.")] = 0,
    rank: Annotated[int | None, typer.Option(min=0, help="Print the plan of this rank, step by step.")] = None,
    verify: Annotated[bool, typer.Option(help="Prove that the schedule does these additions.")] = False,
    model: Annotated[str | None, typer.Option(help="Estimate times on this kind of cluster, h200-ib.")] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="With --model: draw times over world sizes.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Print association, schedule and plan; draw the tree; prove with --verify that they agree."""
    console = Console()
    if accumulate not in ("float32", "wire"):
        raise UsageError(f"--accumulate: expected float32 or wire, got {accumulate!r}")
    for name, value in (("--root", root), ("--rank", rank)):
        if value is not None and value >= world:
            raise UsageError(f"{name}: expected a rank below {world}, got {value}")
    machine = None if model is None else pricing.find_machine(model, node_size)
    if plot is not None and machine is None:
        raise UsageError("--plot needs --model")
    if plot is not None:
        check_can_draw(plot, "--plot")
    order = Association(association, ring_chunk_elems)
    mode: Accumulate = "wire" if accumulate == "wire" else "float32"
    sharded = collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    call = Call(
        collective,
        dtype.real,
        count * (dtype.itemsize // dtype.real.itemsize),
        op if collective.reduces else None,
        even_shards(count, world) if sharded else None,
        root,
    )
    options = PlanOptions(order, mode, schedule, chunk_bytes, machine.node_size if machine else node_size)
    chosen = resolve_schedule(call, world, options)

    console.print(f"[bold]{call.text()}[/bold] over {world} ranks")
    console.print(f"numerics  {order.numerics_id(mode)}   schedule  {chosen.text}")
    told: dict[str, Any] = {
        "call": call.text(),
        "world_size": world,
        "numerics_id": order.numerics_id(mode),
        "schedule": chosen.text,
    }
    if collective.reduces:
        _print_association(console, order, world)
        told["digest"] = order.digest(world).hex()
    told["traffic"] = _traffic(call, order, mode, chosen, world)
    console.print(_traffic_table(told["traffic"]))
    if world <= _TABLE_WORLD or rank is not None:
        _print_plans(console, call, options, world, rank)
    if verify:
        told["proof"] = _verify(console, chosen, call, order, world)
    if machine is not None:
        told["machine"] = machine.name
        told["prices"] = pricing.print_prices(console, machine, world, count * dtype.itemsize, dtype, mode, chosen)
        if plot is not None:
            pricing.plot_prices(plot, machine, dtype, mode)
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=1) + "\n")


def _print_association(console: Console, order: Association, world: int) -> None:
    console.print(draw(order.tree(world)))
    if world <= _TABLE_WORLD:
        console.print(order.text(world), soft_wrap=True)
    if order.name == "ring" and world > 1:
        console.print(f"element i belongs to class (i // {order.ring_chunk_elems}) mod {world}; drawn: class 0")
    console.print(f"digest    {order.digest(world).hex()}")


def _traffic(call: Call, order: Association, mode: Accumulate, chosen: Schedule, world: int) -> dict[str, int]:
    """What all ranks send together."""
    wide = partial_dtype(call.op or ReduceOp.MAX, call.dtype, mode).itemsize
    num_bytes, total = 0, Traffic()
    for share in partition(call, order, chosen, world):
        traffic = chosen.traffic(call.collective, share.cell, call.root)
        total = total.plus(traffic)
        num_bytes += traffic.num_bytes(share.count, call.dtype.itemsize, wide)
    leaves, partials, results = total
    return {
        "steps": chosen.num_steps(call.collective, world),
        "values": sum(total),
        "leaves": leaves,
        "partials": partials,
        "results": results,
        "bytes": num_bytes,
        "bytes_a_rank": round(num_bytes / world),
    }


def _traffic_table(traffic: dict[str, int]) -> Table:
    table = Table("steps", "values sent", "of them leaves", "partials", "results", "bytes sent", "bytes a rank")
    table.add_row(*(f"{number:,}" for number in traffic.values()))
    return table


def _print_plans(console: Console, call: Call, options: PlanOptions, world: int, rank: int | None) -> None:
    if rank is not None:
        mine = make_plan(call, rank, world, options)
        console.print(mine.text(), markup=False, highlight=False, soft_wrap=True)
        console.print(f"fingerprint {mine.fingerprint}")
        return
    table = Table("rank", "plan steps", "messages", "bytes sent", "folds", "scratch bytes", "fingerprint")
    for each in range(world):
        made = make_plan(call, each, world, options)
        table.add_row(
            str(each),
            str(len(made.steps)),
            f"{sum(len(step.sends) for step in made.steps):,}",
            f"{made.sent_bytes:,}",
            f"{sum(len(step.folds) for step in made.steps):,}",
            f"{made.scratch_bytes:,}",
            made.fingerprint[:16],
        )
    console.print(table)


def _verify(console: Console, chosen: Schedule, call: Call, order: Association, world: int) -> dict[str, Any]:
    """Prove it, or raise; what was proved."""
    chosen.check(call.collective, order, world)
    plain = call.collective is Collective.ALL_REDUCE and order == TREE
    if plain and world > _LARGE_WORLD and isinstance(chosen, Staged):
        return _verify_large(console, chosen, world)
    domain, transfers = Digests(), 0
    todo = list(cells(chosen, call.collective, order, world, call.root))
    columns = (*Progress.get_default_columns()[:2], SpinnerColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for cell in progress.track(todo, description="proving"):
            transfers += sum(prove_cell(chosen, call.collective, cell, domain, call.root))
    console.print(
        f"[green]proved[/green]: {len(todo):,} cells, {transfers:,} transfers; every rank ends with the promised tree"
    )
    return {"cells": len(todo), "of_cells": len(todo), "transfers": transfers, "complete": True}


def _verify_large(console: Console, chosen: Staged, world: int) -> dict[str, Any]:
    columns = (*Progress.get_default_columns()[:2], SpinnerColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("proving whole cells")
        proof = prove_staged(chosen, world, lambda done, total: progress.update(task, completed=done, total=total))
    stages = ", ".join(map(str, proof.stages))
    sample = "" if proof.complete else "; the last block is ragged: for the other cells this is a sample"
    console.print(
        f"[green]proved[/green]: every case of the stages of {stages} ranks, and "
        f"{len(proof.owners)} of {world:,} cells as a whole{sample}"
    )
    return {
        "stages": list(proof.stages),
        "cells": len(proof.owners),
        "of_cells": world,
        "complete": proof.complete,
    }
