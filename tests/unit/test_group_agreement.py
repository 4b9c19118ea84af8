# SPDX-License-Identifier: Apache-2.0
"""Introductions at the creation of a group: every rank comes to the same verdict. Threads stand for ranks."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from detcomm.errors import MismatchError, PeerTimeoutError, UsageError
from detcomm.group_agreement import introduce
from detcomm.options import Options
from detcomm.store_access import group_key_space, read, read_all, root_of, serves

LONG_S = 60.0


def introduce_all(store: Store, makers: list[Callable[[], Options] | None], timeout_s: float = LONG_S) -> list[object]:
    """What each rank got or raised; ``None`` in place of a maker is a rank that does not come."""
    results: list[object] = [None] * len(makers)

    def run(rank: int, maker: Callable[[], Options]) -> None:
        try:
            results[rank] = introduce(store, rank, len(makers), maker, timeout_s, {"device": "cpu"}, group="g")
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r, m)) for r, m in enumerate(makers) if m is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_equal_ranks_agree(kind: str, tmp_path: object) -> None:
    store: Store = HashStore() if kind == "hash" else FileStore(f"{tmp_path}/store", 3)
    options = Options(association="ring", timeout=timedelta(seconds=7))
    for result in introduce_all(store, [lambda: options] * 3):
        assert isinstance(result, tuple), result
        assert result[0] == options
        assert [introduction.rank for introduction in result[1]] == [0, 1, 2]
        assert result[1][0].numerics_id == "ring/1[65536]:float32"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"association": "linear"}, "option association: tree on ranks 0, 2; linear on rank 1"),
        ({"accumulate": "wire"}, "option accumulate: float32 on ranks 0, 2; wire on rank 1"),
        ({"ring_chunk_elems": 7}, "option ring_chunk_elems: 65536 on ranks 0, 2; 7 on rank 1"),
        ({"schedule": "oneshot"}, "option schedule: auto on ranks 0, 2; oneshot on rank 1"),
        ({"chunk_bytes": 64}, "option chunk_bytes: None on ranks 0, 2; 64 on rank 1"),
        ({"node_size": 2}, "option node_size: None on ranks 0, 2; 2 on rank 1"),
        ({"transport": "gloo"}, "option transport: auto on ranks 0, 2; gloo on rank 1"),
        ({"timeout": 5.0}, "option timeout: None on ranks 0, 2; 5 s on rank 1"),
    ],
)
def test_a_difference_is_named_on_every_rank(fields: dict[str, object], name: str) -> None:
    makers = [Options, lambda: Options(**fields), Options]  # type: ignore[arg-type]
    results = introduce_all(HashStore(), makers)
    for result in results:
        assert isinstance(result, MismatchError), result
        assert name in str(result)
    assert len({str(result) for result in results}) == 1


def test_a_refusal_is_told_to_all_at_once_even_if_others_never_come() -> None:
    def refuse() -> Options:
        return Options(association="bush")

    results = introduce_all(HashStore(), [Options, refuse, Options, None])
    assert isinstance(results[1], UsageError)
    for rank in (0, 2):
        assert isinstance(results[rank], MismatchError)
        assert "rank 1 refused: option association" in str(results[rank])


def test_who_does_not_come_is_named_and_may_not_wait_in_turn() -> None:
    store = HashStore()
    results = introduce_all(store, [Options, None, Options, None], timeout_s=0.3)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerTimeoutError | MismatchError)
        assert "ranks 1, 3 of 4 did not come" in str(results[rank])
    with pytest.raises(MismatchError, match="did not come within"):
        introduce(store, 1, 4, Options, LONG_S, {"device": "cpu"})


def test_a_fact_of_the_caller_is_compared_too() -> None:
    store = HashStore()
    results: list[object] = []

    def run(rank: int, device: str) -> None:
        try:
            results.append(introduce(store, rank, 2, Options, LONG_S, {"device": device}))
        except MismatchError as error:
            results.append(str(error))

    threads = [threading.Thread(target=run, args=(0, "cpu")), threading.Thread(target=run, args=(1, "cuda"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("device: cpu on rank 0; cuda on rank 1" in str(result) for result in results), results


def test_each_creation_has_a_key_space_of_its_own() -> None:
    store = PrefixStore("0/", HashStore())
    first = [group_key_space(store, rank) for rank in range(2)]
    second = [group_key_space(store, rank) for rank in range(2)]
    first[0].set("key", "old")
    assert read(first[1], "key") == "old"
    assert read(second[0], "key") is None
    second[1].set("key", "new")
    assert read(second[0], "key") == "new"
    assert read(first[0], "key") == "old"


def test_reading_many_keys() -> None:
    store = HashStore()
    store.set("b", "2")
    assert read_all(store, ["a", "b"], 0.05) == [None, "2"]
    assert read_all(store, ["a", "b"], LONG_S, stop=lambda: True) == [None, "2"]
    threading.Timer(0.1, store.set, ("a", "1")).start()
    assert read_all(store, ["a", "b"], LONG_S) == ["1", "2"]


def test_where_a_store_is_served() -> None:
    from torch.distributed import TCPStore

    served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert serves(PrefixStore("a", PrefixStore("b", served)))
    assert root_of(PrefixStore("a", PrefixStore("b", served))).port == served.port
    assert not serves(HashStore())
