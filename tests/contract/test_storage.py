"""Contract of every storage resource: pools, wrappers and plug-ins."""

import gc
import threading

import pytest

from weftplan import device
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.storage import (
    AutoGrowth,
    GuardResource,
    LimitResource,
    NaiveBestFit,
    NaivePool,
    PoisonResource,
    RawResource,
    RoundPool,
    StatisticsResource,
)
from weftplan.storage.ledger import Ledger

MAKERS = {
    "raw": RawResource,
    "naive": NaivePool,
    "round": RoundPool,
    "bounded": lambda place: NaivePool(place, slack=0),
    "auto growth": AutoGrowth,
    "thrifty growth": lambda place: AutoGrowth(place, release_idle=True),
    "best fit": lambda place: NaiveBestFit(place, first=1 << 16),
    "best fit of paddle": lambda place: NaiveBestFit(place, first=1 << 16, refill=1 << 12, unit=256, header=64),
    "no chunks": lambda place: NaiveBestFit(place, first=0),
    "limit": lambda place: LimitResource(NaivePool(place), 1 << 30),
    "poison": lambda place: PoisonResource(NaivePool(place)),
    "guard": lambda place: GuardResource(AutoGrowth(place)),
    "statistics": lambda place: StatisticsResource(RoundPool(place)),
    "limited growth": lambda place: LimitResource(PoisonResource(AutoGrowth(place)), 1 << 30),
    "stack": lambda place: LimitResource(PoisonResource(StatisticsResource(RawResource(place))), 1 << 30),
}


for _klass in Ledger.__subclasses__():
    if not _klass.__module__.startswith(("weftplan.", "tests.")):
        MAKERS[_klass.__name__] = _klass  # a class of a plug-in
DEVICES = {"cpu": device.cpu(0), "cpu_pinned": device.cpu_pinned(0), "sim": device.sim(0)}


class FailingDevice:
    """A device that refuses an allocation while ``allowed`` allocations are live; None means no limit.

    ``out`` counts the live allocations, ``asked`` all requests.
    """

    def __init__(self, allowed=None, context=None):
        self._host = device.get(context or device.cpu())
        self.context = self._host.context
        self.xp = self._host.xp
        self.alignment = self._host.alignment
        self.allowed = allowed
        self.out = 0
        self.asked = 0

    def allocate(self, nbytes):
        self.asked += 1
        if self.allowed is not None and self.out >= self.allowed:
            raise OutOfMemoryError(f"no more than {self.allowed} blocks")
        self.out += 1
        return self._host.allocate(nbytes)

    def free(self, raw):
        self.out -= 1
        self._host.free(raw)

    def memory_info(self):
        return 1 << 40, 1 << 40


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def resource(make):
    return make(FailingDevice())


@pytest.mark.parametrize("kind", [*DEVICES, pytest.param("gpu", marks=pytest.mark.gpu)])
def test_every_resource_on_every_kind_of_device(make, kind):
    """On every device, contents stay separate, a second free raises MXNetError, and the device gets all memory back."""
    place = FailingDevice(context=DEVICES.get(kind) or device.gpu(0))
    resource = make(place)
    for turn in range(3):
        held = [resource.allocate(n, name=f"array {n}") for n in (1, 64, 1000, 1000, 70_000, 0, 300_000)]
        for value, allocation in enumerate(held):
            allocation.raw.fill(value + turn)
        for value, allocation in enumerate(held):
            assert allocation.context == place.context
            assert bool((allocation.raw == value + turn).all())
        for allocation in held:
            resource.free(allocation)
        with pytest.raises(MXNetError, match=r"array 64.*freed before"):
            resource.free(held[1])
    now = resource.statistics()
    assert (now.live, now.requested_bytes, now.allocations) == (0, 0, 21)
    resource.empty_cache()
    assert (place.out, resource.statistics().reserved_bytes) == (0, 0)


def test_allocations_are_exact_and_disjoint(resource):
    """Live allocations share no byte, are aligned to 64 bytes, and have exactly the requested size."""
    held = [resource.allocate(n) for n in (1, 63, 64, 4096, 4097, 100_000)]
    for value, allocation in enumerate(held):
        assert allocation.raw.dtype == "uint8"
        assert allocation.raw.shape == (allocation.nbytes,)
        raw = allocation.raw
        address = getattr(raw, "__cuda_array_interface__", None) or raw.__array_interface__
        assert address["data"][0] % 64 == 0
        allocation.raw.fill(value)
    for value, allocation in enumerate(held):
        assert (allocation.raw == value).all()


def test_zero_bytes_take_no_memory(resource):
    """An empty allocation takes no memory and is freed like any other."""
    empty = resource.allocate(0)
    assert empty.raw.size == 0
    assert resource.statistics().allocated_bytes == 0
    resource.free(empty)
    assert resource.statistics().live == 0


def test_statistics_follow_live_allocations(resource):
    """Requested and allocated bytes follow the live allocations; peaks keep their maximum."""
    first, second = resource.allocate(1000), resource.allocate(5000)
    now = resource.statistics()
    assert (now.live, now.requested_bytes, now.allocations) == (2, 6000, 2)
    assert 6000 <= now.allocated_bytes <= now.reserved_bytes
    resource.free(first)
    now = resource.statistics()
    assert (now.live, now.requested_bytes, now.peak_requested_bytes) == (1, 5000, 6000)
    resource.free(second)
    resource.empty_cache()
    now = resource.statistics()
    assert (now.live, now.requested_bytes, now.allocated_bytes, now.reserved_bytes) == (0, 0, 0, 0)
    assert now.peak_allocated_bytes >= 6000
    assert now.failures == 0


@pytest.mark.parametrize("size", [-1, 1.5, "8", None, True])
def test_a_bad_size_is_refused_and_changes_nothing(resource, size):
    """A size that is no integer >= 0 raises MXNetError and changes nothing."""
    with pytest.raises(MXNetError, match="integer >= 0"):
        resource.allocate(size)
    assert resource.statistics().live == 0


def test_freeing_twice_is_an_error(resource):
    """A second free of an allocation raises MXNetError and does not change the statistics."""
    allocation = resource.allocate(10)
    resource.free(allocation)
    with pytest.raises(MXNetError, match="freed before"):
        resource.free(allocation)
    assert resource.statistics().live == 0


def test_memory_of_another_resource_is_refused(make):
    """A free to another resource raises MXNetError and does not change the memory's contents."""
    ours, theirs = make(FailingDevice()), make(FailingDevice())
    allocation = theirs.allocate(10)
    allocation.raw.fill(7)
    with pytest.raises(MXNetError, match="does not belong to"):
        ours.free(allocation)
    assert (allocation.raw == 7).all()
    theirs.free(allocation)


def test_impossible_sizes_are_out_of_memory(make):
    """A size beyond any machine raises OutOfMemoryError with the requested bytes."""
    resource = make(FailingDevice())
    for nbytes in (1 << 62, 1 << 63, 1 << 80):
        with pytest.raises(OutOfMemoryError, match=f"{nbytes:,} bytes requested"):
            resource.allocate(nbytes)
    assert resource.statistics().failures == 3
    assert resource.statistics().live == 0


def test_free_never_waits_for_the_lock(resource):
    """A free does not wait for the lock that another thread holds inside allocate.

    It appends the memory to a deque, from which the next call takes it.
    """
    bottom = resource
    while hasattr(bottom, "upstream"):
        bottom = bottom.upstream
    allocation = resource.allocate(1000)
    with bottom._lock:
        done = threading.Event()
        thread = threading.Thread(target=lambda: (resource.free(allocation), done.set()))
        thread.start()
        assert done.wait(60)
    thread.join()
    assert resource.statistics().requested_bytes == 0


def test_a_finalizer_inside_allocate_may_free(make):
    """A finalizer that frees memory inside the device's allocate, on the same thread, does not hang."""
    place = FailingDevice()
    resource = make(place)
    old = resource.allocate(100)
    inner = place.allocate

    def allocate(nbytes):
        resource.free(old)  # like a finalizer at the worst moment
        place.allocate = inner
        return inner(nbytes)

    place.allocate = allocate
    new = resource.allocate(50_000_000)
    assert resource.statistics().live == 1
    resource.free(new)
    assert resource.statistics().live == 0


def interrupt_allocate(place, call):
    """Let the device's next allocate run ``call`` once, like a signal handler on the same thread."""
    inner = place.allocate

    def allocate(nbytes):
        place.allocate = inner
        call()
        return inner(nbytes)

    place.allocate = allocate


def test_signal_handler_inside_allocate_may_allocate(make):
    """A signal handler inside an allocation may allocate, free, query and empty the cache; all calls are counted."""
    place = FailingDevice()
    resource = make(place)
    cached, old = resource.allocate(5000), resource.allocate(100)
    resource.free(cached)
    kept = []

    def handler():
        kept.append(resource.allocate(5000, name="kept"))
        kept[0].raw.fill(7)
        kept.append(resource.allocate(0))
        gone = resource.allocate(300)
        gone.raw.fill(8)
        resource.free(gone)
        resource.free(old)
        resource.empty_cache()
        assert resource.statistics().allocations >= 2

    interrupt_allocate(place, handler)
    new = resource.allocate(50_000_000)
    new.raw.fill(9)
    assert (kept[0].raw == 7).all()
    now = resource.statistics()
    assert (now.live, now.requested_bytes, now.allocations) == (3, 50_005_000, 6)
    assert now.requested_bytes <= now.allocated_bytes <= now.reserved_bytes
    for allocation in (*kept, new):
        resource.free(allocation)
    resource.empty_cache()
    now = resource.statistics()
    assert (now.live, now.requested_bytes, now.allocated_bytes, now.reserved_bytes, place.out) == (0, 0, 0, 0, 0)
    with pytest.raises(MXNetError, match="freed before"):
        resource.free(kept[0])


def test_signal_handler_without_memory(make):
    """A signal handler whose allocation fails gets OutOfMemoryError, and the interrupted allocation succeeds."""
    place = FailingDevice()
    resource = make(place)

    def handler():
        inner, place.allowed = place.allowed, 0
        with pytest.raises(OutOfMemoryError, match="60,000 bytes requested"):
            resource.allocate(60_000)
        place.allowed = inner

    interrupt_allocate(place, handler)
    resource.free(resource.allocate(70_000))
    assert resource.statistics().failures == 1
    assert resource.statistics().live == 0


def test_memory_freed_during_a_refusal_is_used(make):
    """If a finalizer frees memory while the device refuses a request, the request is served with that memory."""
    place = FailingDevice(1)
    resource = make(place)
    old = resource.allocate(70_000)
    inner = place.allocate

    def allocate(nbytes):
        place.allocate = inner
        resource.free(old)
        return inner(nbytes)

    place.allocate = allocate
    new = resource.allocate(80_000)
    assert place.out == 1
    assert resource.statistics().failures == 0
    resource.free(new)
    assert resource.statistics().requested_bytes == 0


@pytest.mark.parametrize("allowed", range(5))
def test_failure_leaves_no_leak(make, allowed):
    """If the nth system allocation fails, the report names the request and the holders, and no memory leaks."""
    place = FailingDevice(allowed)
    resource = make(place)
    held = [resource.allocate(70_000 + step, name=f"array {step}") for step in range(allowed)]
    with pytest.raises(OutOfMemoryError, match=r"out of memory on \w+\(0\): 90,000 bytes requested") as caught:
        resource.allocate(90_000)
    if held:
        assert f"array {allowed - 1}: {70_000 + allowed - 1:,}" in str(caught.value)
    assert resource.statistics().failures == 1
    for allocation in held:
        resource.free(allocation)
    resource.empty_cache()
    assert place.out == 0
    place.allowed = None
    resource.free(resource.allocate(70_000))
    assert resource.statistics().live == 0


def test_peaks_can_be_reset(resource):
    """After ``reset_peaks()`` the peaks equal the present values."""
    kept, gone = resource.allocate(3000), resource.allocate(50_000)
    resource.free(gone)
    resource.reset_peaks()
    now = resource.statistics()
    assert (now.peak_requested_bytes, now.requested_bytes) == (3000, 3000)
    assert (now.peak_allocated_bytes, now.peak_reserved_bytes) == (now.allocated_bytes, now.reserved_bytes)
    more = resource.allocate(4000)
    assert resource.statistics().peak_requested_bytes == 7000
    resource.free(more)
    resource.free(kept)


def test_empty_cache_releases_nothing(resource):
    """``empty_cache()`` returns 0 if all reserved memory is live or there is none."""
    assert resource.empty_cache() == 0
    held = resource.allocate(5000)
    assert resource.empty_cache() == 0
    resource.free(held)
    resource.empty_cache()
    assert resource.empty_cache() == 0


def test_system_counts_are_those_of_the_device(make):
    """System allocations and frees in the statistics of the lowest resource equal the device's counts."""
    place = FailingDevice()
    resource = bottom = make(place)
    while hasattr(bottom, "upstream"):
        bottom = bottom.upstream
    held = [resource.allocate(nbytes) for nbytes in (10, 0, 20, 9000, 30)]
    for allocation in held[:3]:
        resource.free(allocation)
    resource.allocate(25)
    for step in range(2):
        now = bottom.statistics()
        assert now.system_allocations == place.asked
        assert now.system_allocations - now.system_frees == place.out
        assert now.hits + now.system_allocations == now.allocations - 1, "all but the empty one"
        if step == 0:
            resource.empty_cache()


def test_many_threads_never_share_memory(resource):
    """Four threads that allocate, fill, check and free memory never see another thread's bytes."""
    wrong = []

    def work(mark):
        for step in range(60):
            allocation = resource.allocate(64 + (step * 37) % 5000)
            allocation.raw.fill(mark)
            if not (allocation.raw == mark).all():
                wrong.append((mark, step))
            resource.free(allocation)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert resource.statistics().live == 0
    assert resource.statistics().requested_bytes == 0
