# SPDX-License-Identifier: Apache-2.0
"""Shared allocations in one process: sizes and types, reuse of what was freed, and pages that go back."""

import ctypes
import gc
import os

import pytest
import torch

import detcomm
from detcomm.errors import UsageError
from detcomm.transports.memory_segment import PAGE_BYTES, open_peer
from detcomm.transports.shared_heap import SharedHeap, process_heap


@pytest.fixture
def heap() -> SharedHeap:
    return SharedHeap(8 * PAGE_BYTES)


def test_allocations_are_apart_and_gaps_close_again(heap: SharedHeap) -> None:
    sizes = [1, PAGE_BYTES, PAGE_BYTES + 1, 4 * PAGE_BYTES]  # 1 + 1 + 2 + 4 pages
    first, second, third, fourth = (heap.allocate(size) for size in sizes)
    assert [second - first, third - second, fourth - third] == [PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]
    with pytest.raises(UsageError, match="no room for 1 bytes"):
        heap.allocate(1)
    heap.free(second, sizes[1])
    heap.free(first, sizes[0])
    assert heap.allocate(2 * PAGE_BYTES) == first
    for address, size in ((first, 2 * PAGE_BYTES), (fourth, sizes[3]), (third, sizes[2])):
        heap.free(address, size)
    assert heap.allocate(8 * PAGE_BYTES) == first


def test_freed_memory_reads_as_zeros(heap: SharedHeap) -> None:
    address = heap.allocate(PAGE_BYTES)
    ctypes.memset(address, 7, PAGE_BYTES)
    heap.free(address, PAGE_BYTES)
    assert ctypes.string_at(heap.allocate(PAGE_BYTES), PAGE_BYTES) == bytes(PAGE_BYTES)


@pytest.mark.parametrize("shape", [(), 5, (3, 4), (2, 0, 3), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_tensors_of_any_shape_and_type(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = detcomm.shared_empty(shape, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == torch.empty(shape).shape
    assert tensor.is_contiguous()
    assert not tensor.any()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 0"):
        detcomm.shared_empty((3, -1))


def test_a_peer_sees_the_tensor_where_it_lies() -> None:
    tensor = detcomm.shared_empty(4, torch.int32)
    tensor[:] = torch.tensor([1, 2, 3, 4])
    segment = process_heap().segment
    mapping, pidfd = open_peer(1, segment.address)
    os.close(pidfd)
    try:
        seen = (mapping.address - segment.mapping.address) + tensor.data_ptr()
        assert list((ctypes.c_int32 * 4).from_address(seen)) == [1, 2, 3, 4]
    finally:
        mapping.close()


def test_memory_is_freed_with_the_last_tensor_that_uses_it() -> None:
    tensor = detcomm.shared_empty(PAGE_BYTES, torch.uint8)
    address, view = tensor.data_ptr(), tensor[5:10]
    del tensor
    gc.collect()
    assert detcomm.shared_empty(1, torch.uint8).data_ptr() != address  # the view still uses it
    view[:] = 1
    del view
    gc.collect()
    assert detcomm.shared_empty(1, torch.uint8).data_ptr() <= address
