# SPDX-License-Identifier: Apache-2.0
"""What the Megatron example learns, and how a sequence is dealt to context-parallel ranks."""

from pathlib import Path

import pytest
import torch

from examples.megatron import arguments, text

LENGTH = 16


@pytest.fixture
def learned(tmp_path: Path) -> torch.Tensor:
    """A text of 1000 bytes, no two neighbours of which are equal."""
    path = tmp_path / "text"
    path.write_bytes(bytes(index % 251 for index in range(1000)))
    return text.read(str(path))


def test_a_sample_depends_on_its_number_alone(learned: torch.Tensor) -> None:
    together = text.micro_batch(learned, 7, 2, LENGTH, seed=1)
    alone = text.micro_batch(learned, 8, 1, LENGTH, seed=1)
    assert torch.equal(together["tokens"][1], alone["tokens"][0])
    assert not torch.equal(together["tokens"][0], together["tokens"][1])
    assert torch.equal(together["tokens"][:, 1:], together["labels"][:, :-1])


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_have_a_piece_and_its_mirror_image(learned: torch.Tensor, size: int) -> None:
    batch = text.micro_batch(learned, 0, 3, LENGTH, seed=1)
    piece = LENGTH // (2 * size)
    shards = [text.context_shard(batch, rank, size)["position_ids"][0].tolist() for rank in range(size)]
    for rank, shard in enumerate(shards):
        first = list(range(rank * piece, (rank + 1) * piece))
        assert shard == first + list(range(LENGTH - (rank + 1) * piece, LENGTH - rank * piece))
    assert sorted(position for shard in shards for position in shard) == list(range(LENGTH))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--sp", "--tp above 1"),
        ("--vpp 2", "--pp above 1"),
        ("--ep 2", "--num-experts"),
        ("--overlap-param-gather", "--distributed-optimizer"),
        ("--exact-norm --backend gloo", "detcomm's"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse(given.split())
    assert says in capsys.readouterr().err
