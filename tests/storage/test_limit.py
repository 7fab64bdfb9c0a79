"""Limit on the bytes of a resource: exact under concurrency, and after failed allocations."""

import pytest

from tests.storage.small_devices import Room
from weftplan import device
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.storage import LimitResource, RawResource


def test_limit_is_exact():
    """Requests up to exactly the limit succeed, one more byte raises OutOfMemoryError, and a free makes room."""
    resource = LimitResource(RawResource(device.get(device.cpu())), 1000)
    first = resource.allocate(600)
    resource.allocate(400)
    with pytest.raises(OutOfMemoryError, match="limit of this resource is 1,000 bytes"):
        resource.allocate(1)
    resource.allocate(0)
    resource.free(first)
    resource.allocate(600)
    assert resource.statistics().failures == 1


def test_limit_of_zero_bytes():
    """A limit of 0 bytes allows only empty allocations; a negative limit raises MXNetError."""
    place = device.get(device.cpu())
    resource = LimitResource(RawResource(place), 0)
    resource.free(resource.allocate(0))
    with pytest.raises(OutOfMemoryError, match="limit of this resource is 0 bytes"):
        resource.allocate(1)
    with pytest.raises(MXNetError, match="at least 0 bytes, got -1"):
        LimitResource(RawResource(place), -1)


class Nosy:
    """A lock that calls ``visit()`` after each release."""

    def __init__(self, lock, visit):
        self.lock, self.visit = lock, visit

    def __enter__(self):
        self.lock.__enter__()

    def __exit__(self, *exc):
        self.lock.__exit__(*exc)
        visit, self.visit = self.visit, lambda: None  # no recursion
        visit()
        self.visit = visit


def test_limit_counts_each_byte_once():
    """While half of the limit is being allocated, another half can be allocated at any moment."""
    resource = LimitResource(RawResource(device.get(device.cpu())), 100)
    visits = []

    def visit():
        visits.append(resource.statistics().requested_bytes)
        resource.free(resource.allocate(50))

    resource._lock = Nosy(resource._lock, visit)
    resource.allocate(50)
    assert visits[0] == 0, "before the bytes are there"
    assert visits[-1] == 50, "and afterwards"
    assert resource.statistics().failures == 0


def test_limit_includes_concurrent_allocations():
    """Bytes that another thread is still allocating count towards the limit."""
    place = device.get(device.cpu())
    upstream = RawResource(place)
    resource, inner = LimitResource(upstream, 100), upstream.allocate

    def allocate(nbytes, *, name=None):
        upstream.allocate = inner
        with pytest.raises(OutOfMemoryError, match="limit of this resource is 100 bytes"):
            resource.allocate(41)
        resource.allocate(40)
        return inner(nbytes, name=name)

    upstream.allocate = allocate
    resource.allocate(60)
    assert resource.statistics().peak_requested_bytes == 100


def test_limit_forgets_refused_allocations():
    """The bytes of a failed allocation no longer count towards the limit."""
    place = Room(100)
    resource = LimitResource(RawResource(place), 1000)
    with pytest.raises(OutOfMemoryError, match="device full"):
        resource.allocate(900)
    inner = place.allocate
    place.allocate = lambda nbytes: 1 // 0
    with pytest.raises(ZeroDivisionError):
        resource.allocate(900)
    place.allocate, place.total = inner, 1000
    resource.allocate(1000)
    assert resource.statistics().failures == 1
