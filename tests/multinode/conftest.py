# SPDX-License-Identifier: Apache-2.0
"""One lab of eight nodes for all these tests, and one process that makes ranks on them.

Where a machine allows no labs the tests are skipped, and say why.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.ranks import NodeRanks
from tests.netlab.isolation import Unavailable, isolation
from tests.netlab.lab import MOST_NODES, Lab


@pytest.fixture(scope="session")
def needs_labs() -> None:
    """Skips where labs cannot be made."""
    try:
        isolation()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def standing_lab(needs_labs: None) -> Iterator[Lab]:
    """The lab."""
    with tempfile.TemporaryDirectory(prefix="netlab-") as folder, Lab.up(MOST_NODES, Path(folder) / "lab") as lab:
        yield lab


@pytest.fixture(scope="session")
def standing_ranks(standing_lab: Lab) -> Iterator[NodeRanks]:
    """The process that makes ranks."""
    with NodeRanks(standing_lab) as ranks:
        yield ranks


@pytest.fixture
def lab(standing_lab: Lab) -> Iterator[Lab]:
    """The lab with its links calm and whole, before a test and after it."""
    yield standing_lab
    standing_lab.heal()


@pytest.fixture
def ranks(standing_ranks: NodeRanks, lab: Lab) -> NodeRanks:
    """Makes ranks on the lab's nodes."""
    return standing_ranks
