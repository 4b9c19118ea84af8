# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench``: how fast, against other libraries in the same processes, interleaved; in nccl-tests' words."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detcomm.collectives import Collective, DType, ReduceOp, is_legal
from detcomm.commands import lists
from detcomm.commands.bench_compare import print_changes
from detcomm.commands.output_files import check_can_draw, writable
from detcomm.commands.progress import progress
from detcomm.commands.ranks import NprocOption, Place, take_place
from detcomm.errors import UsageError
from detcomm.options import Options

if TYPE_CHECKING:  # needs torch, which the command line does without until a command does not
    from detcomm.bench import Case, Report

bench_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
ItersOption = Annotated[
    int | None, typer.Option("-n", "--iters", min=1, help="Calls that are timed. Default: what --turn-s allows.")
]
WarmupOption = Annotated[int, typer.Option("-w", "--warmup_iters", min=0, help="Calls before, not timed.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Turns of each contender.")]
TurnOption = Annotated[float, typer.Option(min=0.0, help="About how long a turn takes, without -n.")]
AverageOption = Annotated[
    int, typer.Option("-a", "--average", min=0, max=3, help="Over ranks: 0 rank 0, 1 average, 2 least, 3 largest.")
]

_TYPES = {"float": DType.FLOAT32, "double": DType.FLOAT64, "half": DType.FLOAT16}
_OPS = {"prod": ReduceOp.PRODUCT} | {
    op.value: op for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
}
_MEASURED_TYPES = tuple(dtype for dtype in DType if dtype.kind != "complex")


@bench_app.callback(invoke_without_command=True)
def bench_command(
    context: typer.Context,
    nproc: NprocOption = None,
    minbytes: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size.")] = "4K",
    maxbytes: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    stepfactor: Annotated[int | None, typer.Option("-f", "--stepfactor", min=2, help="From size to size; 4.")] = None,
    stepbytes: Annotated[
        str | None, typer.Option("-i", "--stepbytes", help="From size to size, in place of -f.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="In place of these, a list: 4K,1M,64M.")] = None,
    iters: ItersOption = None,
    warmup_iters: WarmupOption = 5,
    ops: Annotated[str, typer.Option("-o", "--op", help="sum, prod, min, max, avg, all, or a list.")] = "sum",
    dtypes: Annotated[str, typer.Option("-d", "--datatype", "--dtypes", help="Types, all, or a list.")] = "float32",
    root: Annotated[int, typer.Option("-r", "--root", min=0, help="Receiver of a reduce.")] = 0,
    check_iters: Annotated[int, typer.Option("-c", "--check", min=0, help="Checks before each timing; 0: none.")] = 1,
    average: AverageOption = 3,
    collectives: Annotated[str, typer.Option(help="A list; reduce, too.")] = "all_reduce,reduce_scatter,all_gather",
    against: Annotated[str | None, typer.Option(help="gloo, nccl, nccl-ring, native, mpi: a list.")] = None,
    device: DeviceOption = "cpu",
    places: Annotated[str, typer.Option("--place", help="both, out, in, or usual: as training calls it.")] = "both",
    rounds: RoundsOption = 9,
    turn_s: TurnOption = 0.1,
    json_file: Annotated[
        Path | None, typer.Option("-J", "--json", callback=writable, help="Write the results to this file, too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="Draw time, busbw and ratio over size to this file.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing: compare two files of --json, old and new.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0.0, help="With --compare: fail if a time grew by more than this share, 0.1.")
    ] = None,
) -> None:
    """Time collectives of detcomm and of others, in turns; every result is checked before it is timed.

    Options, header and columns are those of nccl-tests where it has them; ranks are processes, so it has no -t and -g.
    `detcomm bench train` times a training step. Exits with 1 if a result is wrong, or detcomm's bits are not as
    specified.
    """
    if context.invoked_subcommand is not None:
        return
    if compare is not None:
        raise typer.Exit(print_changes(*compare, threshold))
    if threshold is not None:
        raise UsageError("--threshold needs --compare")
    names = check_backends(nproc, against, device)
    wanted = list(
        _cases(
            _collectives(collectives),
            _dtypes(dtypes),
            _operations(ops),
            _sizes(minbytes, maxbytes, stepfactor, stepbytes) if sizes is None else lists.to_bytes(sizes, "--sizes"),
            root,
        )
    )
    if places not in ("both", "out", "in", "usual"):
        raise UsageError(f"--place: expected both, out, in or usual, got {places!r}")
    if plot is not None:
        check_can_draw(plot, "--plot")
    place = take_place(nproc, over_mpi="mpi" in names)
    check_backends(place.world_size, against, device)
    if root >= place.world_size:
        raise UsageError(f"--root: expected a rank below {place.world_size}, got {root}")
    from detcomm.bench import Effort

    effort = Effort(rounds, turn_s, iters=iters, warmup_iters=warmup_iters, over_ranks=average)
    report = _measure(place, names, wanted, device, places, effort, check_iters)
    if place.speaks:
        content = report.to_json()
        if json_file is not None:
            json_file.write_text(json.dumps(content, indent=1) + "\n")
        if plot is not None:
            from detcomm.bench.plotting import plot as draw

            draw(content, plot)
        for breach in report.breaches():
            print(f"detcomm: {breach}", file=sys.stderr)
    if report.breaches():
        raise typer.Exit(1)


def _measure(
    place: Place,
    names: Sequence[str],
    wanted: "Sequence[Case]",
    device: str,
    places: str,
    effort: Any,
    check_iters: int,
) -> "Report":
    """Measure and print row by row."""
    import torch.distributed as dist

    from detcomm.bench import Job, Measurement, Report, measure, open_contender
    from detcomm.bench import Place as Where
    from detcomm.bench.report import measured, refusal_texts, row
    from detcomm.bench.table import footer, header, legend, line
    from detcomm.reducers.over_torch import own_device

    options = Options.from_environment()
    where = {"both": (Where.OUT, Where.IN), "out": (Where.OUT,), "in": (Where.IN,), "usual": None}[places]
    dist.init_process_group("gloo")
    own = own_device(device)
    contenders = [open_contender(name, own) for name in names]
    job = Job(own, effort, options.order, options.accumulate, where, check_iters)
    found_so_far: list[Measurement] = []
    report = Report(place.world_size, "detcomm", found_so_far, device, options.numerics_id)
    say = print if place.speaks else lambda *_: None
    with progress(place.speaks, "measuring") as tell:
        for text in (*_about(report, wanted, effort, check_iters), *legend(report.numerics_id)):
            say(text)
        told: list[str] = []
        number = 0
        for collective, cases in groupby(wanted, lambda case: case.collective):
            say(f"# Collective: {collective.value}")
            for text in header():
                say(text)
            rows: list[dict[str, Any]] = []
            for case in cases:
                number += 1
                tell(f"{number} of {len(wanted)}: {collective.value} {case.dtype.value} {case.num_bytes} B")
                if case.count(place.world_size) == 0:
                    say(f"# {case.num_bytes} B of {case.dtype.value}: less than an element a rank, left out")
                    continue
                found = measure(case, contenders, job)
                found_so_far += found
                subject = next(one for one in found if one.contender == report.subject)
                for one in found:
                    if measured(one):
                        rows.append(row(one, subject, place.world_size))
                        say(line(rows[-1]))
                    fresh = [text for text in refusal_texts(one) if text not in told]
                    told += fresh
                    for text in fresh:
                        say(f"# not measured: {text}")
                sys.stdout.flush()
            for text in footer(rows):
                say(text)
    for contender in contenders:
        contender.close()
    dist.destroy_process_group()
    return report


def _about(report: "Report", wanted: "Sequence[Case]", effort: Any, check_iters: int) -> Iterator[str]:
    """The first lines: what, where, how."""
    from detcomm.bench.report import versions

    machine = report.machine
    yield "# " + " ".join(f"{name} {version}" for name, version in versions().items())
    yield (
        f"# {report.world_size} ranks, {report.device}: {machine['cores']} cores of {machine['processor']}, "
        f"load average {machine['load_average_1min']}"
    )
    if "gpu" in machine:
        yield f"# {machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, NCCL {machine['nccl']}"
    if machine["environment"]:
        yield "# " + " ".join(f"{name}={value}" for name, value in machine["environment"].items())
    sizes = [case.num_bytes for case in wanted]
    calls = f"{effort.iters}" if effort.iters is not None else f"as many as fill {effort.turn_s:g} s a turn"
    yield (
        f"# minBytes {min(sizes)} maxBytes {max(sizes)} warmup iters: {effort.warmup_iters} iters: {calls} "
        f"rounds: {effort.rounds} validation: {check_iters}"
    )
    yield "#"


def check_backends(world_size: int | None, against: str | None, device: str) -> list[str]:
    """Who is measured, detcomm first.

    Raises:
        UsageError: before any rank is started: no torch, no such device or backend, or too few ranks.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError("this command needs torch: pip install torch") from None
    from detcomm.bench.contenders import check_contenders
    from detcomm.reducers.over_torch import check_device

    if world_size is not None and world_size < 2:
        raise UsageError(f"bench needs at least two ranks, got {world_size}")
    check_device(device)
    names = lists.split(against if against is not None else "nccl,nccl-ring" if device == "cuda" else "gloo")
    names = ["detcomm", *(name for name in names if name != "detcomm")]
    check_contenders(names, device)
    return names


def _cases(
    collectives: Sequence[Collective],
    dtypes: Sequence[DType],
    ops: Sequence[ReduceOp],
    sizes: Sequence[int],
    root: int,
) -> "Iterator[Case]":
    from detcomm.bench.cases import Case

    for collective in collectives:
        for dtype in dtypes:
            legal = [op for op in ops if is_legal(op, dtype)] if collective.reduces else [ReduceOp.SUM]
            if not legal:
                raise UsageError(f"--op: none of {', '.join(op.value for op in ops)} is defined on {dtype.value}")
            for op in legal:
                for size in sizes:
                    yield Case(collective, dtype, size, op, root if collective is Collective.REDUCE else 0)


def _collectives(text: str) -> list[Collective]:
    known = {collective.value: collective for collective in Collective}
    return lists.known_values(text, known, "--collectives")


def _dtypes(text: str) -> list[DType]:
    if text == "all":
        return list(_MEASURED_TYPES)
    return lists.known_values(text, _TYPES | {dtype.value: dtype for dtype in _MEASURED_TYPES}, "--datatype")


def _operations(text: str) -> list[ReduceOp]:
    if text == "all":
        return list(dict.fromkeys(_OPS.values()))
    return lists.known_values(text, _OPS, "--op")


def _sizes(minbytes: str, maxbytes: str, stepfactor: int | None, stepbytes: str | None) -> list[int]:
    if stepfactor is not None and stepbytes is not None:
        raise UsageError("-f and -i: expected one of them")
    (first,), (last,) = lists.to_bytes(minbytes, "--minbytes"), lists.to_bytes(maxbytes, "--maxbytes")
    if not 0 < first <= last:
        raise UsageError(f"--minbytes: expected 1 to --maxbytes, got {minbytes} to {maxbytes}")
    step = lists.to_bytes(stepbytes, "--stepbytes")[0] if stepbytes is not None else 0
    if stepbytes is not None and step < 1:
        raise UsageError(f"--stepbytes: expected at least 1, got {stepbytes}")
    sizes = [first]
    while (following := sizes[-1] + step if step else sizes[-1] * (stepfactor or 4)) <= last:
        sizes.append(following)
    return sizes
