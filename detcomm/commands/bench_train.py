# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench train``: a data-parallel training step with each backend, and what of its communication shows."""

import json
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from detcomm.collectives import DType
from detcomm.commands import lists
from detcomm.commands.bench import (
    AverageOption,
    DeviceOption,
    ItersOption,
    RoundsOption,
    TurnOption,
    WarmupOption,
    bench_app,
    check_backends,
)
from detcomm.commands.output_files import JsonOption
from detcomm.commands.progress import progress
from detcomm.commands.ranks import NprocOption, take_place
from detcomm.errors import UsageError
from detcomm.options import Options

_UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_TYPES = {dtype.value: dtype for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)}


@bench_app.command("train")
def bench_train_command(
    nproc: NprocOption = None,
    params: Annotated[str, typer.Option(help="Parameters, about: 25M is 25,000,000.")] = "25M",
    layers: Annotated[int, typer.Option(min=1, help="Layers of equal size.")] = 16,
    bucket_mb: Annotated[float, typer.Option(min=0.001, help="MiB of one bucket of gradients.")] = 25.0,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank.")] = 64,
    dtype: Annotated[str, typer.Option("-d", "--datatype", help="Of weights and gradients.")] = "float32",
    against: Annotated[str | None, typer.Option(help="Backends of torch, or nccl-ring: a list.")] = None,
    device: DeviceOption = "cpu",
    iters: ItersOption = None,
    warmup_iters: WarmupOption = 1,
    average: AverageOption = 3,
    rounds: RoundsOption = 9,
    turn_s: TurnOption = 0.5,
    json_file: JsonOption = None,
) -> None:
    """Time a DistributedDataParallel step with each backend and without communication, in turns.

    Exits with 1 if gradients are wrong, or detcomm's bits are not as specified.
    """
    (element_type,) = lists.known_values(dtype, _TYPES, "--datatype")[:1]
    num_parameters = _number(params)
    names = check_backends(nproc, against, device)
    if alien := [name for name in names if name in ("native", "mpi")]:
        raise UsageError(f"--against {alien[0]}: DistributedDataParallel takes a backend of torch")
    place = take_place(nproc)
    check_backends(place.world_size, against, device)
    import torch.distributed as dist

    from detcomm.bench import Effort, Job
    from detcomm.bench.contenders import TorchContender, open_contender
    from detcomm.bench.report import describe_machine, versions
    from detcomm.bench.training import Training, train
    from detcomm.reducers.over_torch import own_device

    options = Options.from_environment()
    dist.init_process_group("gloo")
    own = own_device(device)
    contenders = [open_contender(name, own) for name in names]
    effort = Effort(rounds, turn_s, iters=iters, warmup_iters=warmup_iters, over_ranks=average)
    training = Training(num_parameters, layers, bucket_mb, batch, element_type)
    with progress(place.speaks, "training") as say:
        machine = describe_machine()
        torch_contenders = [one for one in contenders if isinstance(one, TorchContender)]
        rows = train(training, torch_contenders, Job(own, effort, options.order, options.accumulate), say)
    for contender in contenders:
        contender.close()
    dist.destroy_process_group()
    if place.speaks:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(
            f"{place.world_size} ranks, {device}: {training.exact_parameters:,} parameters of {element_type.value} in "
            f"{layers} layers, buckets of {bucket_mb:g} MiB, {batch} samples a rank; {options.numerics_id}"
        )
        _show(console, rows)
        if json_file is not None:
            about = {
                "kind": "training",
                "taken": time.strftime("%Y-%m-%d", time.gmtime()),
                "machine": machine,
                "versions": versions(),
                "world_size": place.world_size,
                "device": device,
                "numerics_id": options.numerics_id,
                "subject": "detcomm",
                "parameters": training.exact_parameters,
                "layers": layers,
                "bucket_mb": bucket_mb,
                "batch": batch,
                "dtype": element_type.value,
            }
            json_file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    if any(row.get("wrong") or (row["contender"] == "detcomm" and row.get("bitdiff")) for row in rows):
        raise typer.Exit(1)


def _show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("backend", box=None)
    for name in ("step us", "p99 us", "exposed us", "buckets alone us", "#wrong", "#bitdiff", "digest"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            f"{row[name]:,.0f}" if name in row else "" for name in ("step_us", "p99_us", "exposed_us", "buckets_us")
        ]
        counts = [f"{row[name]:,}" if name in row else "" for name in ("wrong", "bitdiff")]
        table.add_row(row["contender"], *cells, *counts, row.get("digest", ""))
    console.print(table)
    checked = next((row["checked"] for row in rows if "checked" in row), 0)
    console.print(
        "step: median over turns; exposed: longer than without communication (none), turn by turn, median; "
        f"#wrong, #bitdiff: of {checked:,} gradients, against the specified sum",
        soft_wrap=True,
    )


def _number(text: str) -> int:
    unit = text[-1:].upper()
    number, factor = (text[:-1], _UNITS[unit]) if unit in _UNITS else (text, 1)
    try:
        value = int(float(number) * factor)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(f"--params: expected a number such as 25M, got {text!r}")
    return value
