"""Effects of storage flags: each flag is changed and its effect observed, on each kind of device."""

import warnings

import pytest

import weftplan as mx
from tests.storage.small_devices import MIB, Room
from weftplan import config, device
from weftplan.errors import ConfigError, ConfigWarning, OutOfMemoryError
from weftplan.storage import AutoGrowth, NaiveBestFit, NaivePool, PoisonResource, RawResource, RoundPool
from weftplan.storage import registry as storage_registry

CONTEXTS = {"cpu": device.cpu(7), "cpu_pinned": device.cpu_pinned(7), "sim": device.sim(7), "gpu": device.gpu(7)}
PREFIXES = [("cpu", "CPU"), ("cpu_pinned", "CPU_PINNED"), ("sim", "GPU"), ("gpu", "GPU")]
ALIGNMENT = {"cpu": 64, "cpu_pinned": 64, "sim": 64, "gpu": 256}


@pytest.fixture
def build_resource(monkeypatch):
    """Return a function that builds the resource of a 1 GiB device with the given flags.

    ``build(kind, strategy, compat, total, **flags)`` returns the resource and the device. Flags have no prefix
    ``FLAGS_``.
    """
    config._reset_for_tests()

    def build(kind, strategy=None, compat=None, total=1 << 30, **flags):
        if strategy is not None:
            flags["allocator_strategy"] = strategy
        for name, value in flags.items():
            monkeypatch.setenv(f"FLAGS_{name}" if not name.isupper() else name, str(value))
        if compat is not None:
            monkeypatch.setenv("WEFTPLAN_STORAGE_COMPAT", compat)
        room = Room(total, CONTEXTS[kind], ALIGNMENT[kind])
        monkeypatch.setattr(device, "get", lambda context: room)
        resource = storage_registry.build(CONTEXTS[kind])
        return resource, room

    yield build
    config._reset_for_tests()


def allocated_sizes(resource, room, *sizes):
    """Serve requests of the given sizes; return the sizes that the device has allocated."""
    for nbytes in sizes:
        resource.allocate(nbytes)
    return room.taken


def lowest_resource(resource):
    while hasattr(resource, "upstream"):
        resource = resource.upstream
    return resource


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize(
    ("strategy", "cls"), [(None, NaivePool), ("naive_best_fit", NaiveBestFit), ("auto_growth", AutoGrowth)]
)
@pytest.mark.shows("FLAGS_allocator_strategy")
def test_allocator_strategy(build_resource, kind, strategy, cls):
    """FLAGS_allocator_strategy chooses the pool on every kind of device; without it, MXNet's pool is used."""
    assert type(lowest_resource(build_resource(kind, strategy)[0])) is cls


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("cpu", "fraction_of_cpu_memory_to_use"),
        ("cpu_pinned", "fraction_of_cuda_pinned_memory_to_use"),
        ("sim", "fraction_of_gpu_memory_to_use"),
        ("gpu", "fraction_of_gpu_memory_to_use"),
    ],
)
@pytest.mark.parametrize(("fraction", "chunk"), [(0.25, 256 * MIB), (0.5, 512 * MIB), (0, 10)])
@pytest.mark.shows(
    "FLAGS_fraction_of_cpu_memory_to_use",
    "FLAGS_fraction_of_cuda_pinned_memory_to_use",
    "FLAGS_fraction_of_gpu_memory_to_use",
)
def test_fractions(build_resource, kind, flag, fraction, chunk):
    """A fraction sets the first chunk to that share of memory; 0 allocates exactly the request."""
    more = {"initial_cpu_memory_in_mb": 10_000} if kind == "cpu" else {}
    assert allocated_sizes(*build_resource(kind, "naive_best_fit", **{flag: fraction}, **more), 10) == [chunk]


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("cpu", "fraction_of_cpu_memory_to_use"),
        ("cpu_pinned", "fraction_of_cuda_pinned_memory_to_use"),
        ("sim", "fraction_of_gpu_memory_to_use"),
        ("gpu", "fraction_of_gpu_memory_to_use"),
    ],
)
@pytest.mark.shows("FLAGS_fraction_of_*")
def test_a_fraction_alone_chooses_its_strategy(build_resource, kind, flag):
    """A fraction without a strategy chooses naive_best_fit, as Paddle's documents use it."""
    assert allocated_sizes(*build_resource(kind, **{flag: 0.25}), 10) == [256 << 20]


@pytest.mark.parametrize(
    "other",
    [{"allocator_strategy": "mxnet"}, {"MXNET_GPU_MEM_POOL_TYPE": "Naive"}, {"allocator_strategy": "auto_growth"}],
)
def test_a_strategy_goes_before_a_fraction(build_resource, other):
    """With another strategy or an MXNet pool, a fraction has no effect, and a warning says so."""
    with pytest.warns(ConfigWarning, match=r"FLAGS_fraction_of_gpu_memory_to_use=0\.25 has no effect on sim"):
        resource, room = build_resource("sim", fraction_of_gpu_memory_to_use=0.25, **other)
    assert sum(allocated_sizes(resource, room, 10)) < 64 << 20


@pytest.mark.parametrize("kind", ["cpu", "cpu_pinned", "sim", "gpu"])
def test_default_chunks(build_resource, kind):
    """By default a chunk has 500 MiB on a host, half of page-locked memory, and 92 % of free GPU memory."""
    gib = 1 << 30
    share = int(0.92 * gib)
    expected = {"cpu": 500 * MIB, "cpu_pinned": gib // 2, "sim": share // 64 * 64, "gpu": share // 256 * 256}
    assert allocated_sizes(*build_resource(kind, "naive_best_fit"), 10) == [expected[kind]]


@pytest.mark.shows("FLAGS_initial_cpu_memory_in_mb")
def test_initial_cpu_memory_in_mb(build_resource):
    """Each chunk of a host has FLAGS_initial_cpu_memory_in_mb MiB."""
    sizes = allocated_sizes(
        *build_resource("cpu", "naive_best_fit", initial_cpu_memory_in_mb=100), 10, 99 * MIB, 99 * MIB
    )
    assert sizes == [100 * MIB, 100 * MIB]


def test_initial_cpu_memory_is_at_most_the_share(build_resource):
    """A chunk of a host has at most FLAGS_fraction_of_cpu_memory_to_use of the memory."""
    flags = {"initial_cpu_memory_in_mb": 100, "fraction_of_cpu_memory_to_use": 0.0625}
    assert allocated_sizes(*build_resource("cpu", "naive_best_fit", **flags), 10) == [64 * MIB]


@pytest.mark.parametrize("kind", ["sim", "gpu"])
@pytest.mark.shows("FLAGS_initial_gpu_memory_in_mb", "FLAGS_reallocate_gpu_memory_in_mb")
def test_initial_and_reallocate_gpu_memory_in_mb(build_resource, kind):
    """The first chunk of a GPU has the initial size, and later chunks have the reallocate size."""
    flags = {"initial_gpu_memory_in_mb": 100, "reallocate_gpu_memory_in_mb": 30}
    sizes = allocated_sizes(*build_resource(kind, "naive_best_fit", **flags), 60 * MIB, 40 * MIB, 20 * MIB, 20 * MIB)
    assert sizes == [100 * MIB, 30 * MIB, 30 * MIB]


@pytest.mark.parametrize("kind", ["sim", "gpu"])
def test_initial_gpu_memory_alone(build_resource, kind):
    """With only the initial size set, later chunks are a share of the free memory."""
    flags = {"initial_gpu_memory_in_mb": 512, "fraction_of_gpu_memory_to_use": 0.5}
    assert allocated_sizes(*build_resource(kind, "naive_best_fit", **flags), 512 * MIB, 10) == [512 * MIB, 256 * MIB]


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.shows("FLAGS_auto_growth_chunk_size_in_mb")
def test_auto_growth_chunk_size_in_mb(build_resource, kind):
    """A pool grows by FLAGS_auto_growth_chunk_size_in_mb, or by the size of a larger request."""
    sizes = allocated_sizes(*build_resource(kind, "auto_growth", auto_growth_chunk_size_in_mb=4), 10, 10, 5 * MIB)
    assert sizes == [4 * MIB, 5 * MIB]


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize(("flag", "held"), [(0, [20 * MIB, MIB, 2 * MIB]), (1, [20 * MIB, 2 * MIB])])
@pytest.mark.shows("FLAGS_free_when_no_cache_hit")
def test_free_when_no_cache_hit(build_resource, kind, flag, held):
    """With FLAGS_free_when_no_cache_hit an unused chunk is returned before the pool grows."""
    resource, room = build_resource(kind, "auto_growth", free_when_no_cache_hit=flag)
    kept = resource.allocate(20 * MIB)
    resource.free(resource.allocate(MIB))
    resource.allocate(2 * MIB)
    assert room.taken == held
    resource.free(kept)


@pytest.mark.parametrize(("compat", "held"), [("documents", [5 * MIB]), ("paddle", [4 * MIB, 5 * MIB])])
def test_auto_growth_stays_near_its_peak(build_resource, compat, held):
    """An unused chunk is returned if growth would exceed the peak of live bytes by 1/16; Paddle keeps it."""
    resource, room = build_resource("gpu", "auto_growth", compat=compat)
    resource.free(resource.allocate(4 * MIB))
    resource.allocate(5 * MIB)
    assert room.taken == held


@pytest.mark.parametrize("kind", CONTEXTS)
def test_auto_growth_without_a_chunk_size(build_resource, kind):
    """Without a chunk size the pool grows by the request, rounded up to the device's alignment."""
    assert allocated_sizes(*build_resource(kind, "auto_growth"), 10) == [ALIGNMENT[kind]]


@pytest.mark.parametrize("strategy", [None, "naive_best_fit", "auto_growth"])
@pytest.mark.parametrize("kind", ["sim", "gpu"])
@pytest.mark.shows("FLAGS_gpu_memory_limit_mb")
def test_gpu_memory_limit_mb(build_resource, kind, strategy):
    """Under every strategy the pool stays below the limit; the error names the flag.

    The pool releases its cache before a request fails.
    """
    flags = {"initial_gpu_memory_in_mb": 8} if strategy == "naive_best_fit" else {}
    resource, room = build_resource(kind, strategy, gpu_memory_limit_mb=16, **flags)
    first = resource.allocate(9 * MIB)
    resource.free(first)
    second = resource.allocate(10 * MIB)
    with pytest.raises(OutOfMemoryError, match="FLAGS_gpu_memory_limit_mb=16 allows 16,777,216 bytes"):
        resource.allocate(9 * MIB)
    assert sum(room.taken) <= 16 * MIB
    resource.free(second)
    resource.empty_cache()
    assert room.taken == []


@pytest.mark.parametrize("kind", ["cpu", "cpu_pinned"])
def test_gpu_memory_limit_ignores_hosts(build_resource, kind):
    """FLAGS_gpu_memory_limit_mb does not limit host memory."""
    build_resource(kind, gpu_memory_limit_mb=1)[0].allocate(5 * MIB)


@pytest.mark.parametrize("strategy", [None, "naive_best_fit", "auto_growth"])
@pytest.mark.parametrize("kind", ["cpu", "cpu_pinned", "gpu", "sim"])
@pytest.mark.shows("FLAGS_init_allocated_mem")
def test_init_allocated_mem(build_resource, kind, strategy):
    """With FLAGS_init_allocated_mem, allocated memory is filled with 0xEF under every strategy."""
    resource, _ = build_resource(kind, strategy, init_allocated_mem=1, **_small(kind, strategy))
    allocation = resource.allocate(100)
    assert (allocation.raw == 0xEF).all()
    allocation.raw.fill(1)
    resource.free(allocation)
    assert (resource.allocate(100).raw == 0xEF).all()


def _small(kind, strategy):
    """Return flags for small first chunks, which are quick to fill."""
    return {"initial_gpu_memory_in_mb": 1} if strategy == "naive_best_fit" and kind in ("sim", "gpu") else {}


def test_memory_is_not_filled_without_the_flag(build_resource):
    """Without FLAGS_init_allocated_mem, reused memory still has its old values."""
    resource, _ = build_resource("cpu")
    allocation = resource.allocate(100)
    allocation.raw.fill(7)
    resource.free(allocation)
    assert (resource.allocate(100).raw == 7).all()


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.shows("MXNET_*_MEM_POOL_TYPE", "MXNET_*_MEM_POOL_PAGE_SIZE")
def test_mxnet_pools_by_kind_of_device(build_resource, kind, prefix):
    """MXNET_*_MEM_POOL_TYPE and its page size apply to the kind of device in their names."""
    resource, _ = build_resource(
        kind, **{f"MXNET_{prefix}_MEM_POOL_TYPE": "Round", f"MXNET_{prefix}_MEM_POOL_PAGE_SIZE": 1024}
    )
    assert type(lowest_resource(resource)) is RoundPool
    assert lowest_resource(resource).rounded(1) == 1024


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.shows("MXNET_*_MEM_LARGE_ALLOC_ROUND_SIZE")
def test_mxnet_large_alloc_round_size(build_resource, kind, prefix):
    """The Naive pool rounds sizes above the large-allocation size up to multiples of it."""
    resource, _ = build_resource(kind, **{f"MXNET_{prefix}_MEM_LARGE_ALLOC_ROUND_SIZE": 8192})
    assert lowest_resource(resource).rounded(9000) == 16384


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.shows("MXNET_*_MEM_POOL_ROUND_LINEAR_CUTOFF")
def test_mxnet_round_linear_cutoff(build_resource, kind, prefix):
    """The Round pool uses powers of two up to the cutoff and multiples of it above."""
    more = {f"MXNET_{prefix}_MEM_POOL_TYPE": "Round", f"MXNET_{prefix}_MEM_POOL_ROUND_LINEAR_CUTOFF": 20}
    assert lowest_resource(build_resource(kind, **more)[0]).rounded(2 * MIB + 1) == 3 * MIB


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.parametrize(("percent", "held"), [(5, 3), (95, 1)])
@pytest.mark.shows("MXNET_*_MEM_POOL_RESERVE")
def test_mxnet_pool_reserve(build_resource, kind, prefix, percent, held):
    """Cached blocks are returned if an allocation would leave less than the reserve free.

    Live memory may use the reserve.
    """
    resource, room = build_resource(kind, total=100 * MIB, **{f"MXNET_{prefix}_MEM_POOL_RESERVE": percent})
    for block in [resource.allocate(n * MIB) for n in (2, 4)]:
        resource.free(block)
    resource.allocate(6 * MIB)
    assert len(room.taken) == held
    resource.allocate(80 * MIB)


# -- Paddle's source --------------------------------------------------------------------------------------------------


def test_compat_share_excludes_five_percent(build_resource):
    """With Paddle's rules a chunk is 0.92 of 95 % of the free memory."""
    resource, room = build_resource("gpu", "naive_best_fit", compat="paddle", total=1000 * MIB)
    resource.allocate(1)
    assert room.taken == [int(0.92 * (950 * MIB)) // 256 * 256]


@pytest.mark.shows("WEFTPLAN_STORAGE_COMPAT")
def test_compat_blocks_shrink(build_resource):
    """With Paddle's rules each refill is a share of the memory that is free at that time."""
    flags = {"fraction_of_gpu_memory_to_use": 0.5}
    resource, room = build_resource("gpu", "naive_best_fit", compat="paddle", total=1000 * MIB, **flags)
    for _ in range(3):
        resource.allocate(200 * MIB)
    assert room.taken[0] == 475 * MIB
    assert room.taken[1] == int(0.5 * (525 * MIB * 95 // 100)) // 256 * 256
    assert len(room.taken) == 2


@pytest.mark.parametrize("strategy", ["naive_best_fit", "auto_growth"])
def test_compat_hosts_have_no_pool(build_resource, strategy):
    """With Paddle's rules host memory has no pool under either strategy."""
    assert type(build_resource("cpu", strategy, compat="paddle")[0]) is RawResource


@pytest.mark.parametrize("strategy", ["naive_best_fit", "auto_growth"])
def test_compat_page_locked_memory_is_capped(build_resource, strategy):
    """With Paddle's rules the fraction limits page-locked memory, a chunk is 1/256 of it, and a unit is 64 KiB."""
    resource, room = build_resource("cpu_pinned", strategy, compat="paddle", fraction_of_cuda_pinned_memory_to_use=0.25)
    resource.allocate(1)
    assert room.taken == [MIB]
    assert lowest_resource(resource).unit == 65536
    with pytest.raises(OutOfMemoryError, match="allows 268,435,456"):
        resource.allocate(256 * MIB)


def test_compat_auto_growth_rounds_to_256(build_resource):
    """With Paddle's rules auto_growth rounds to 256 bytes, even if the device's alignment is 64."""
    assert allocated_sizes(*build_resource("sim", "auto_growth", compat="paddle"), 1) == [256]


def test_compat_fills_memory_with_naive_best_fit_alone(build_resource):
    """With Paddle's rules FLAGS_init_allocated_mem has no effect under auto_growth, and a warning says so."""
    with pytest.warns(ConfigWarning, match="FLAGS_init_allocated_mem=1 has no effect on gpu"):
        resource, _ = build_resource("gpu", "auto_growth", compat="paddle", init_allocated_mem=1)
    assert not isinstance(resource, PoisonResource)


# -- bad input --------------------------------------------------------------------------------------------------------

MEBIBYTES = [
    "initial_cpu_memory_in_mb",
    "initial_gpu_memory_in_mb",
    "reallocate_gpu_memory_in_mb",
    "gpu_memory_limit_mb",
    "auto_growth_chunk_size_in_mb",
]
FRACTIONS = [
    "fraction_of_gpu_memory_to_use",
    "fraction_of_cpu_memory_to_use",
    "fraction_of_cuda_pinned_memory_to_use",
]


@pytest.mark.parametrize("name", MEBIBYTES)
@pytest.mark.parametrize("text", ["-1", "1.5", "many", "1MB", str(2**41)])
def test_bad_sizes(monkeypatch, name, text):
    """A size that is not an integer of MiB in range raises ConfigError with the flag and the range."""
    monkeypatch.setenv(f"FLAGS_{name}", text)
    with pytest.raises(ConfigError, match=rf"FLAGS_{name}='{text}' is not legal: expected an integer from 0 to"):
        config.get(f"FLAGS_{name}")


@pytest.mark.parametrize("name", FRACTIONS)
@pytest.mark.parametrize("text", ["-0.1", "1.01", "half", "nan", "inf"])
def test_bad_fractions(monkeypatch, name, text):
    """A fraction that is not a number from 0 to 1 raises ConfigError with the flag and the range."""
    monkeypatch.setenv(f"FLAGS_{name}", text)
    with pytest.raises(ConfigError, match=rf"FLAGS_{name}='{text}' is not legal: expected a number from 0 to 1"):
        config.get(f"FLAGS_{name}")


def test_an_unknown_strategy(build_resource):
    """An unknown strategy raises ConfigError with all strategies and the nearest name."""
    with pytest.raises(ConfigError, match=r"one of mxnet, naive_best_fit, auto_growth.*did you mean auto_growth"):
        build_resource("cpu", "Auto_Growth")


@pytest.mark.parametrize(
    ("kind", "strategy", "flag", "why"),
    [
        ("cpu", None, "auto_growth_chunk_size_in_mb", "the pools are MXNet's"),
        ("gpu", "auto_growth", "initial_gpu_memory_in_mb", "the strategy in force is auto_growth"),
        ("cpu", "naive_best_fit", "auto_growth_chunk_size_in_mb", "the strategy in force is naive_best_fit"),
    ],
)
def test_flag_without_effect_warns_once(build_resource, kind, strategy, flag, why):
    """A flag without effect gives one warning with its value, the device and the reason."""
    with pytest.warns(ConfigWarning, match=rf"FLAGS_{flag}=1 has no effect on {kind}\(7\): {why}"):
        build_resource(kind, strategy, **{flag: 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_resource(kind, strategy, **{flag: 1})


def test_sizes_in_mib_override_the_fraction(build_resource):
    """If both sizes in MiB are set, a fraction has no effect, and a warning says so."""
    flags = {"initial_gpu_memory_in_mb": 1, "reallocate_gpu_memory_in_mb": 1, "fraction_of_gpu_memory_to_use": 0.5}
    with pytest.warns(ConfigWarning, match="fraction_of_gpu_memory_to_use=0.5 has no effect.*both sizes"):
        build_resource("gpu", "naive_best_fit", **flags)


def test_device_variable_overrides_the_strategy(build_resource):
    """MXNET_CPU_MEM_POOL_TYPE overrides FLAGS_allocator_strategy, and a warning says so."""
    with pytest.warns(ConfigWarning, match="FLAGS_allocator_strategy=auto_growth has no effect.*POOL_TYPE is set"):
        resource, _ = build_resource("cpu", "auto_growth", MXNET_CPU_MEM_POOL_TYPE="Unpooled")
    assert type(resource) is RawResource


def test_late_flag_change_warns(monkeypatch):
    """A flag changed after its first use gives a warning at the next bind, with the old value and the line."""
    config._reset_for_tests()
    config.process("FLAGS_init_allocated_mem")
    line = __file__
    monkeypatch.setenv("FLAGS_init_allocated_mem", "1")
    data = mx.sym.Variable("data")
    with pytest.warns(ConfigWarning, match=rf"(?s)FLAGS_init_allocated_mem changed.*first made \({line}:\d+\).*False"):
        (data + 1).simple_bind(mx.cpu(), data=(2,))
    config._reset_for_tests()
