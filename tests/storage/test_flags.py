"""Every storage flag has an effect: each is changed and the effect observed, on each kind of device."""

import warnings

import pytest

import weftplan as mx
from tests.storage.rooms import MIB, Room
from weftplan import config, device
from weftplan.errors import ConfigError, ConfigWarning, OutOfMemoryError
from weftplan.storage import AutoGrowth, NaiveBestFit, NaivePool, PoisonResource, RawResource, RoundPool
from weftplan.storage import registry as storage_registry

CONTEXTS = {"cpu": device.cpu(7), "cpu_pinned": device.cpu_pinned(7), "sim": device.sim(7), "gpu": device.gpu(7)}
PREFIXES = [("cpu", "CPU"), ("cpu_pinned", "CPU_PINNED"), ("sim", "GPU"), ("gpu", "GPU")]
ALIGNMENT = {"cpu": 64, "cpu_pinned": 64, "sim": 64, "gpu": 256}


@pytest.fixture
def built(monkeypatch):
    """Build the stack of a 1 GiB device under flags without their prefix."""
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


def taken_by(resource, room, *sizes):
    """Return the sizes that the device allocated while these requests were served."""
    for nbytes in sizes:
        resource.allocate(nbytes)
    return room.taken


def bottom(resource):
    while hasattr(resource, "upstream"):
        resource = resource.upstream
    return resource


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize(
    ("strategy", "cls"), [(None, NaivePool), ("naive_best_fit", NaiveBestFit), ("auto_growth", AutoGrowth)]
)
@pytest.mark.shows("FLAGS_allocator_strategy")
def test_allocator_strategy(built, kind, strategy, cls):
    """Unset means MXNet's pools, on every kind of device."""
    assert type(bottom(built(kind, strategy)[0])) is cls


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
def test_fractions(built, kind, flag, fraction, chunk):
    """The first chunk is that share of the memory; 0 allocates the size of the request."""
    more = {"initial_cpu_memory_in_mb": 10_000} if kind == "cpu" else {}
    assert taken_by(*built(kind, "naive_best_fit", **{flag: fraction}, **more), 10) == [chunk]


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
def test_a_fraction_alone_chooses_its_strategy(built, kind, flag):
    """As Paddle's documents set it, without a strategy; a named strategy or a pool of MXNet goes before it."""
    assert taken_by(*built(kind, **{flag: 0.25}), 10) == [256 << 20]


@pytest.mark.parametrize(
    "other",
    [{"allocator_strategy": "mxnet"}, {"MXNET_GPU_MEM_POOL_TYPE": "Naive"}, {"allocator_strategy": "auto_growth"}],
)
def test_a_strategy_goes_before_a_fraction(built, other):
    """No large chunk is taken, and a warning says that the fraction does nothing."""
    with pytest.warns(ConfigWarning, match=r"FLAGS_fraction_of_gpu_memory_to_use=0\.25 has no effect on sim"):
        resource, room = built("sim", fraction_of_gpu_memory_to_use=0.25, **other)
    assert sum(taken_by(resource, room, 10)) < 64 << 20


@pytest.mark.parametrize("kind", ["cpu", "cpu_pinned", "sim", "gpu"])
def test_default_chunks(built, kind):
    """500 MiB on a host, half of its memory page-locked, 92 % of the free memory on a GPU."""
    gib = 1 << 30
    share = int(0.92 * gib)
    expected = {"cpu": 500 * MIB, "cpu_pinned": gib // 2, "sim": share // 64 * 64, "gpu": share // 256 * 256}
    assert taken_by(*built(kind, "naive_best_fit"), 10) == [expected[kind]]


@pytest.mark.shows("FLAGS_initial_cpu_memory_in_mb")
def test_initial_cpu_memory_in_mb(built):
    """Each chunk of a host has this size in MiB."""
    sizes = taken_by(*built("cpu", "naive_best_fit", initial_cpu_memory_in_mb=100), 10, 99 * MIB, 99 * MIB)
    assert sizes == [100 * MIB, 100 * MIB]


def test_initial_cpu_memory_is_at_most_the_share(built):
    """The smaller of the two applies."""
    flags = {"initial_cpu_memory_in_mb": 100, "fraction_of_cpu_memory_to_use": 0.0625}
    assert taken_by(*built("cpu", "naive_best_fit", **flags), 10) == [64 * MIB]


@pytest.mark.parametrize("kind", ["sim", "gpu"])
@pytest.mark.shows("FLAGS_initial_gpu_memory_in_mb", "FLAGS_reallocate_gpu_memory_in_mb")
def test_initial_and_reallocate_gpu_memory_in_mb(built, kind):
    """The first chunk has one size and later chunks the other; both override the fraction."""
    flags = {"initial_gpu_memory_in_mb": 100, "reallocate_gpu_memory_in_mb": 30}
    sizes = taken_by(*built(kind, "naive_best_fit", **flags), 60 * MIB, 40 * MIB, 20 * MIB, 20 * MIB)
    assert sizes == [100 * MIB, 30 * MIB, 30 * MIB]


@pytest.mark.parametrize("kind", ["sim", "gpu"])
def test_initial_gpu_memory_alone(built, kind):
    """Later chunks are then a share of the free memory."""
    flags = {"initial_gpu_memory_in_mb": 512, "fraction_of_gpu_memory_to_use": 0.5}
    assert taken_by(*built(kind, "naive_best_fit", **flags), 512 * MIB, 10) == [512 * MIB, 256 * MIB]


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.shows("FLAGS_auto_growth_chunk_size_in_mb")
def test_auto_growth_chunk_size_in_mb(built, kind):
    """The pool grows by this size, or by a larger request; without the flag by the rounded request."""
    sizes = taken_by(*built(kind, "auto_growth", auto_growth_chunk_size_in_mb=4), 10, 10, 5 * MIB)
    assert sizes == [4 * MIB, 5 * MIB]


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize(("flag", "held"), [(0, [20 * MIB, MIB, 2 * MIB]), (1, [20 * MIB, 2 * MIB])])
@pytest.mark.shows("FLAGS_free_when_no_cache_hit")
def test_free_when_no_cache_hit(built, kind, flag, held):
    """With it an unused chunk is returned before the pool grows."""
    resource, room = built(kind, "auto_growth", free_when_no_cache_hit=flag)
    kept = resource.allocate(20 * MIB)
    resource.free(resource.allocate(MIB))
    resource.allocate(2 * MIB)
    assert room.taken == held
    resource.free(kept)


@pytest.mark.parametrize(("compat", "held"), [("documents", [5 * MIB]), ("paddle", [4 * MIB, 5 * MIB])])
def test_auto_growth_stays_near_its_peak(built, compat, held):
    """An unused chunk is returned before the pool would hold a sixteenth more; Paddle's source keeps it."""
    resource, room = built("gpu", "auto_growth", compat=compat)
    resource.free(resource.allocate(4 * MIB))
    resource.allocate(5 * MIB)
    assert room.taken == held


@pytest.mark.parametrize("kind", CONTEXTS)
def test_auto_growth_without_a_chunk_size(built, kind):
    """The unit is the device's alignment."""
    assert taken_by(*built(kind, "auto_growth"), 10) == [ALIGNMENT[kind]]


@pytest.mark.parametrize("strategy", [None, "naive_best_fit", "auto_growth"])
@pytest.mark.parametrize("kind", ["sim", "gpu"])
@pytest.mark.shows("FLAGS_gpu_memory_limit_mb")
def test_gpu_memory_limit_mb(built, kind, strategy):
    """Under every strategy the pool stays below it and releases its cache first, and the message names the flag."""
    flags = {"initial_gpu_memory_in_mb": 8} if strategy == "naive_best_fit" else {}
    resource, room = built(kind, strategy, gpu_memory_limit_mb=16, **flags)
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
def test_gpu_memory_limit_ignores_hosts(built, kind):
    """It is a limit for GPUs only."""
    built(kind, gpu_memory_limit_mb=1)[0].allocate(5 * MIB)


@pytest.mark.parametrize("strategy", [None, "naive_best_fit", "auto_growth"])
@pytest.mark.parametrize("kind", ["cpu", "cpu_pinned", "gpu", "sim"])
@pytest.mark.shows("FLAGS_init_allocated_mem")
def test_init_allocated_mem(built, kind, strategy):
    """Fresh memory holds 0xEF under every strategy, also on a simulated device with its own poison."""
    resource, _ = built(kind, strategy, init_allocated_mem=1, **_small(kind, strategy))
    allocation = resource.allocate(100)
    assert (allocation.raw == 0xEF).all()
    allocation.raw.fill(1)
    resource.free(allocation)
    assert (resource.allocate(100).raw == 0xEF).all()


def _small(kind, strategy):
    """Return flags for chunks that are filled quickly."""
    return {"initial_gpu_memory_in_mb": 1} if strategy == "naive_best_fit" and kind in ("sim", "gpu") else {}


def test_memory_is_not_filled_without_the_flag(built):
    """Without the flag, written values stay."""
    resource, _ = built("cpu")
    allocation = resource.allocate(100)
    allocation.raw.fill(7)
    resource.free(allocation)
    assert (resource.allocate(100).raw == 7).all()


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.shows("MXNET_*_MEM_POOL_TYPE", "MXNET_*_MEM_POOL_PAGE_SIZE")
def test_mxnet_pools_by_kind_of_device(built, kind, prefix):
    """Type and page size of the pool, each for its devices."""
    resource, _ = built(kind, **{f"MXNET_{prefix}_MEM_POOL_TYPE": "Round", f"MXNET_{prefix}_MEM_POOL_PAGE_SIZE": 1024})
    assert type(bottom(resource)) is RoundPool
    assert bottom(resource).rounded(1) == 1024


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.shows("MXNET_*_MEM_LARGE_ALLOC_ROUND_SIZE")
def test_mxnet_large_alloc_round_size(built, kind, prefix):
    """Naive rounds larger sizes to multiples of it."""
    resource, _ = built(kind, **{f"MXNET_{prefix}_MEM_LARGE_ALLOC_ROUND_SIZE": 8192})
    assert bottom(resource).rounded(9000) == 16384


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.shows("MXNET_*_MEM_POOL_ROUND_LINEAR_CUTOFF")
def test_mxnet_round_linear_cutoff(built, kind, prefix):
    """Round uses powers of two up to the cutoff, and multiples of it above."""
    more = {f"MXNET_{prefix}_MEM_POOL_TYPE": "Round", f"MXNET_{prefix}_MEM_POOL_ROUND_LINEAR_CUTOFF": 20}
    assert bottom(built(kind, **more)[0]).rounded(2 * MIB + 1) == 3 * MIB


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES)
@pytest.mark.parametrize(("percent", "held"), [(5, 3), (95, 1)])
@pytest.mark.shows("MXNET_*_MEM_POOL_RESERVE")
def test_mxnet_pool_reserve(built, kind, prefix, percent, held):
    """Cached blocks are returned before new memory would leave less than that share free; live memory may use it."""
    resource, room = built(kind, total=100 * MIB, **{f"MXNET_{prefix}_MEM_POOL_RESERVE": percent})
    for block in [resource.allocate(n * MIB) for n in (2, 4)]:
        resource.free(block)
    resource.allocate(6 * MIB)
    assert len(room.taken) == held
    resource.allocate(80 * MIB)


# -- Paddle's source --------------------------------------------------------------------------------------------------


def test_compat_share_excludes_five_percent(built):
    """0.92 of 95 % of the free memory: 0.874."""
    resource, room = built("gpu", "naive_best_fit", compat="paddle", total=1000 * MIB)
    resource.allocate(1)
    assert room.taken == [int(0.92 * (950 * MIB)) // 256 * 256]


@pytest.mark.shows("WEFTPLAN_STORAGE_COMPAT")
def test_compat_blocks_shrink(built):
    """Each refill is a share of the memory free at that time."""
    flags = {"fraction_of_gpu_memory_to_use": 0.5}
    resource, room = built("gpu", "naive_best_fit", compat="paddle", total=1000 * MIB, **flags)
    for _ in range(3):
        resource.allocate(200 * MIB)
    assert room.taken[0] == 475 * MIB
    assert room.taken[1] == int(0.5 * (525 * MIB * 95 // 100)) // 256 * 256
    assert len(room.taken) == 2


@pytest.mark.parametrize("strategy", ["naive_best_fit", "auto_growth"])
def test_compat_hosts_have_no_pool(built, strategy):
    """Both strategies leave host memory to the system."""
    assert type(built("cpu", strategy, compat="paddle")[0]) is RawResource


@pytest.mark.parametrize("strategy", ["naive_best_fit", "auto_growth"])
def test_compat_page_locked_memory_is_capped(built, strategy):
    """The share is a cap, a chunk the 256th part of it, a unit 64 KiB, under both strategies."""
    resource, room = built("cpu_pinned", strategy, compat="paddle", fraction_of_cuda_pinned_memory_to_use=0.25)
    resource.allocate(1)
    assert room.taken == [MIB]
    assert bottom(resource).unit == 65536
    with pytest.raises(OutOfMemoryError, match="allows 268,435,456"):
        resource.allocate(256 * MIB)


def test_compat_auto_growth_rounds_to_256(built):
    """On every GPU, whatever its alignment."""
    assert taken_by(*built("sim", "auto_growth", compat="paddle"), 1) == [256]


def test_compat_fills_memory_with_naive_best_fit_alone(built):
    """As in Paddle's source: with auto_growth the flag has no effect, and a warning says so."""
    with pytest.warns(ConfigWarning, match="FLAGS_init_allocated_mem=1 has no effect on gpu"):
        resource, _ = built("gpu", "auto_growth", compat="paddle", init_allocated_mem=1)
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
    """A size is a non-negative integer of MiB; the message names the flag, the value and the range."""
    monkeypatch.setenv(f"FLAGS_{name}", text)
    with pytest.raises(ConfigError, match=rf"FLAGS_{name}='{text}' is not legal: expected an integer from 0 to"):
        config.get(f"FLAGS_{name}")


@pytest.mark.parametrize("name", FRACTIONS)
@pytest.mark.parametrize("text", ["-0.1", "1.01", "half", "nan", "inf"])
def test_bad_fractions(monkeypatch, name, text):
    """A fraction is a number from 0 to 1."""
    monkeypatch.setenv(f"FLAGS_{name}", text)
    with pytest.raises(ConfigError, match=rf"FLAGS_{name}='{text}' is not legal: expected a number from 0 to 1"):
        config.get(f"FLAGS_{name}")


def test_an_unknown_strategy(built):
    """The message lists the candidates and the nearest one."""
    with pytest.raises(ConfigError, match=r"one of mxnet, naive_best_fit, auto_growth.*did you mean auto_growth"):
        built("cpu", "Auto_Growth")


@pytest.mark.parametrize(
    ("kind", "strategy", "flag", "why"),
    [
        ("cpu", None, "auto_growth_chunk_size_in_mb", "the pools are MXNet's"),
        ("gpu", "auto_growth", "initial_gpu_memory_in_mb", "the strategy in force is auto_growth"),
        ("cpu", "naive_best_fit", "auto_growth_chunk_size_in_mb", "the strategy in force is naive_best_fit"),
    ],
)
def test_flag_without_effect_warns_once(built, kind, strategy, flag, why):
    """The warning names flag, value, device and reason, and is not repeated."""
    with pytest.warns(ConfigWarning, match=rf"FLAGS_{flag}=1 has no effect on {kind}\(7\): {why}"):
        built(kind, strategy, **{flag: 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(kind, strategy, **{flag: 1})


def test_sizes_in_mib_override_the_fraction(built):
    """A fraction set in addition is reported as without effect."""
    flags = {"initial_gpu_memory_in_mb": 1, "reallocate_gpu_memory_in_mb": 1, "fraction_of_gpu_memory_to_use": 0.5}
    with pytest.warns(ConfigWarning, match="fraction_of_gpu_memory_to_use=0.5 has no effect.*both sizes"):
        built("gpu", "naive_best_fit", **flags)


def test_device_variable_overrides_the_strategy(built):
    """MXNET_CPU_MEM_POOL_TYPE wins for its kind of device; the flag is reported as without effect there."""
    with pytest.warns(ConfigWarning, match="FLAGS_allocator_strategy=auto_growth has no effect.*POOL_TYPE is set"):
        resource, _ = built("cpu", "auto_growth", MXNET_CPU_MEM_POOL_TYPE="Unpooled")
    assert type(resource) is RawResource


def test_late_flag_change_warns(monkeypatch):
    """The next bind warns that it is too late, with the value in force and the line of its first use."""
    config._reset_for_tests()
    config.process("FLAGS_init_allocated_mem")
    line = __file__
    monkeypatch.setenv("FLAGS_init_allocated_mem", "1")
    data = mx.sym.Variable("data")
    with pytest.warns(ConfigWarning, match=rf"(?s)FLAGS_init_allocated_mem changed.*first made \({line}:\d+\).*False"):
        (data + 1).simple_bind(mx.cpu(), data=(2,))
    config._reset_for_tests()
