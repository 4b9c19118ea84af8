# SPDX-License-Identifier: Apache-2.0
"""Who takes torch's suite: stock gloo as the measure, detcomm by its own name, and detcomm under stock names.

Many tests ask for a stock backend by name. An alias lets them through: the suite and torch's Python side believe in
the stock name, while the groups are made by detcomm. Under ``nccl`` the suite wants GPUs; ``scripts/gpu-check`` takes
it there.
"""

from dataclasses import dataclass

DETCOMM = "detcomm"
STOCK = "gloo"


@dataclass(frozen=True)
class Subject:
    """A backend, and the name under which the suite knows it."""

    name: str
    suite_name: str
    backend: str

    @property
    def is_alias(self) -> bool:
        return self.suite_name != self.backend


MEASURE = Subject(STOCK, STOCK, STOCK)
SUBJECTS = (
    MEASURE,
    Subject(DETCOMM, DETCOMM, DETCOMM),
    Subject("detcomm as gloo", "gloo", DETCOMM),
    Subject("detcomm as mpi", "mpi", DETCOMM),
)

CUDA_MEASURE = Subject("nccl", "nccl", "nccl")
ON_CUDA = Subject("detcomm as nccl", "nccl", DETCOMM)


def named(name: str) -> Subject:
    return next(subject for subject in (*SUBJECTS, CUDA_MEASURE, ON_CUDA) if subject.name == name)


@dataclass(frozen=True)
class Run:
    """The suite once: one subject, one world size."""

    subject: Subject
    world_size: int
    only_large: bool = False
    """Whether to take only the tests that are skipped in small worlds."""


WORLD_SIZES = (2, 3, 4)
LARGE_WORLD_SIZE = 8


def whole() -> list[Run]:
    """All that the report is made of, the measure first in each world.

    As ``mpi`` the suite makes groups of ranks 1 and 2 in every world, and so needs three; it asks for no large one.
    """
    runs = [Run(subject, world_size) for world_size in WORLD_SIZES for subject in SUBJECTS]
    runs += [Run(subject, LARGE_WORLD_SIZE, True) for subject in SUBJECTS]
    return [run for run in runs if run.subject.suite_name != "mpi" or 2 < run.world_size < LARGE_WORLD_SIZE]
