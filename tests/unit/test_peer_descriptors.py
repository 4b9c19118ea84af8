# SPDX-License-Identifier: Apache-2.0
"""Descriptors from process to process: each peer gets them once, and who does not come is not waited for."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from detcomm.cuda.peer_memory.virtual import DescriptorOffer, DescriptorRequest
from detcomm.errors import TransportError
from tests.fake_device_memory import num_descriptors


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    made = []
    for content in (b"first", b"second"):
        made.append(os.memfd_create("test"))
        os.write(made[-1], content)
    yield made
    for descriptor in made:
        os.close(descriptor)


def _num_open() -> int:
    return num_descriptors("memfd:test")


def test_every_peer_gets_them_in_order(descriptors: list[int]) -> None:
    before = _num_open()
    offer = DescriptorOffer([os.dup(descriptor) for descriptor in descriptors], 2)
    requests = [DescriptorRequest(offer.name) for _ in range(2)]
    server = threading.Thread(target=offer.serve, args=(time.monotonic() + 60.0,))
    server.start()
    for request in requests:
        fetched = request.fetch(time.monotonic() + 60.0)
        assert [os.pread(descriptor, 10, 0) for descriptor in fetched] == [b"first", b"second"]
        for descriptor in fetched:
            os.close(descriptor)
        request.close()
    server.join()
    offer.close()
    offer.close()
    assert _num_open() == before


def test_nothing_to_offer_has_no_name() -> None:
    offer = DescriptorOffer([], 3)
    assert offer.name == ""
    offer.serve(time.monotonic() + 600.0)
    offer.close()


def test_a_peer_that_does_not_come_is_not_waited_for(descriptors: list[int]) -> None:
    offer = DescriptorOffer([os.dup(descriptors[0])], 1)
    with pytest.raises(TransportError, match="a peer did not fetch"):
        offer.serve(time.monotonic() + 0.05)
    offer.close()


def test_an_offer_that_is_gone_is_told(descriptors: list[int]) -> None:
    offer = DescriptorOffer([os.dup(descriptors[0])], 1)
    request = DescriptorRequest(offer.name)
    with pytest.raises(TransportError, match="did not come"):
        request.fetch(time.monotonic() + 0.05)
    offer.close()
    with pytest.raises(TransportError, match=r"did not come|closed the connection"):
        request.fetch(time.monotonic() + 60.0)
    request.close()
    with pytest.raises(TransportError, match="no connection"):
        DescriptorRequest(offer.name)
