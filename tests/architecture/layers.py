# SPDX-License-Identifier: Apache-2.0
"""The layers of detcomm, lowest first. A module imports from its own layer and from those below it, never upwards.

A name stands for the module and all that lies in it. Every module belongs to exactly one layer.
"""

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("words", ("version", "errors", "collectives")),
    ("contract", ("association", "call", "movement_call", "options")),
    ("schedule", ("schedule", "schedules")),
    ("plan", ("simulate", "partition", "plan", "lower", "tuning", "planner", "lockstep")),
    ("memory", ("float_environment", "fold_spec", "portable_fold", "native", "native_shm", "fold", "transports.base")),
    (
        "machine",
        (
            "header",
            "hosts",
            "launcher",
            "process_identity",
            "process_ends",
            "polling_store",
            "request_queue",
            "shared_gpus",
            "lifeline",
            "stock_gloo",
            "store_access",
        ),
    ),
    ("transports", ("transports", "shared_allocation", "shared_memory_rendezvous", "connect")),
    ("execution", ("agreement", "executor", "memory", "request", "communicator", "splits")),
    ("checks", ("golden_vectors", "testing")),
    ("cuda", ("cuda",)),
    (
        "watch",
        (
            *("abandonable", "group_agreement", "group_creation", "faults", "line_ring"),
            *("watch", "watch_thread", "watched_group", "watched_store"),
        ),
    ),
    (
        "group",
        (
            *("tensor_memory", "text_agreement", "torch_calls", "work", "worker", "coalescing"),
            *(
                "movement",
                "movement_waits",
                "movement_work",
                "collective_movement",
                "lazy_communicator",
                "direct_calls",
                "lazy_cuda",
                "group",
            ),
            *("cuda.works", "cuda.stock_mover", "cuda.direct_calls", "cuda.group", "cuda.movement"),
        ),
    ),
    (
        "torch",
        (
            *(
                "outside_dynamo",
                "sparse",
                "mem_pool_methods",
                "symmetric_pool",
                "torch_methods",
                "process_group",
                "cuda_process_group",
                "backend",
            ),
            *("batched_p2p", "group_assembly", "torch_backend"),
        ),
    ),
    (
        "tools",
        (
            *("draw", "contributions", "reducers", "probing", "verification", "pricing", "bench"),
            *("golden", "megatron", "commands"),
        ),
    ),
    ("doors", ("__init__", "__main__")),
)

PLANNER_LAYERS = ("words", "contract", "schedule", "plan")
"""The half that imports neither torch nor a numerical or native library, whatever the machine has."""

NEVER_IN_THE_PLANNER = ("torch", "numpy", "ctypes", "mpi4py", "cupy")

NUMPY_IN_THE_PLANNER = ("simulate",)
"""The simulator's third value domain is NumPy arrays."""

DECIDE_BITS = (
    "detcomm/association.py",
    "detcomm/collectives.py",
    "detcomm/schedules/",
    "detcomm/partition.py",
    "detcomm/lower.py",
    "detcomm/simulate.py",
    "detcomm/executor.py",
    "detcomm/float_environment.py",
    "detcomm/portable_fold.py",
    "detcomm/cuda/compile.py",
    "detcomm/cuda/gathering.py",
    "detcomm/megatron/exact_squares.py",
    "native/",
)
"""Where a line may carry the mark ``bits:``, since result bits depend on it. Elsewhere such a line is misplaced."""

LONGEST_LINES = 300
LENGTH_EXCEPTIONS: dict[str, int] = {}
"""Files that may be longer, with their own limit. Must shrink."""

SHORTEST_LINES = 30
SHORT_ON_PURPOSE = ("detcomm/version.py",)


def layer_of(module: str) -> int | None:
    """The index of a module's layer; ``module`` is dotted, without the leading ``detcomm.``."""
    name = module
    while name:
        for index, (_, members) in enumerate(LAYERS):
            if name in members:
                return index
        name = name.rpartition(".")[0]
    return None
