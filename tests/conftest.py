"""Configuration and fixtures of all tests."""

import contextlib
import gc
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from tests.support.checkout import share_checkout
from tests.support.seeds import FRESH

share_checkout(Path(__file__).resolve().parents[1], os.environ)

if sys.dont_write_bytecode:
    # Nothing may be written next to the sources. But the tests start hundreds of processes, and each would compile the
    # package again, so all of them share pytest's own folder for bytecode.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(
        Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    )
    sys.dont_write_bytecode = False
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""

os.environ.setdefault("WEFTPLAN_PROGRESS", "0")  # else a child's loop on a slow machine could print a progress line

# With it print writes its arguments one by one, and the lines of ranks that share a pipe mix. Some tests set it.
os.environ.pop("PYTHONUNBUFFERED", None)

settings.register_profile(
    "weftplan", deadline=None, derandomize=not FRESH, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("weftplan")
"""No time limit per example: on a loaded machine a test must not fail for being slow."""

if "forkserver" in multiprocessing.get_all_start_methods():
    # Modules that every child would import again, as its parent's main module or for the tests' datasets.
    multiprocessing.set_forkserver_preload(["pytest", "weftplan.data.iterators"])

collect_ignore_glob = ["golden/*.py", "*/golden/*.py"]
"""Scripts that write golden files; they run with MXNet's interpreter, not under pytest."""


def pytest_addoption(parser):
    """Add ``--first-contact``, which runs only the GPU tests for the first minutes with a card, in their order."""
    parser.addoption(
        "--first-contact",
        action="store_true",
        help="run tests/first_contact alone, and write its page",
    )


def pytest_collection_modifyitems(config, items):
    """Deselect all tests but those of first contact if ``--first-contact`` is given."""
    if config.getoption("--first-contact"):
        chosen = [item for item in items if item.path.name == "test_first_contact.py"]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection(session):
    """Disable garbage collection while tests are collected, because collection leaves no garbage."""
    gc.disable()


def pytest_collection_finish(session):
    """Exclude the tests from later garbage collections."""
    set_aside()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Collect the tests of a file before its doctests, which ignore errors of import: the tests would be lost, too."""
    return sorted((yield), key=lambda collector: isinstance(collector, DoctestModule))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exclude objects kept by earlier files, such as plans, networks and fixture results, from later collections."""
    if nextitem is None or nextitem.path != item.path:
        if "weftplan.device.simulated_device" in sys.modules:
            put_back()
        set_aside()


@pytest.fixture(autouse=True, scope="session")
def short_searches():
    """Limit the search for recomputation to 100 prices.

    Tests of plans, budgets and curves pass with any search effort. Tests of the search itself request `whole_searches`.
    """
    from weftplan.planner.recompute import ladder

    whole = ladder.MAX_PRICES, ladder.EXHAUSTIVE
    ladder.MAX_PRICES, ladder.EXHAUSTIVE = 100, 6
    yield whole
    ladder.MAX_PRICES, ladder.EXHAUSTIVE = whole


@pytest.fixture(autouse=True)
def numpy_without_a_seed():
    """Reset NumPy's global generator before each test, so that no earlier test's seed affects it."""
    np.random.set_bit_generator(np.random.MT19937(0))


@pytest.fixture(autouse=True, scope="session")
def no_plans_from_before():
    """Ignore cached plans of earlier runs, so that the tests compute their plans."""
    from weftplan.executor import plan_cache

    plan_cache._CODE = ""


@pytest.fixture
def whole_searches(short_searches, monkeypatch):
    """Search with the effort of a normal run."""
    from weftplan.planner.recompute import ladder

    monkeypatch.setattr(ladder, "MAX_PRICES", short_searches[0])
    monkeypatch.setattr(ladder, "EXHAUSTIVE", short_searches[1])


@pytest.fixture
def folder(tmp_path):
    """Yield a temporary folder that is the memory of ``file(0)``, limited to 64 MiB."""
    from weftplan import device, storage
    from weftplan.device import registry
    from weftplan.device.file_device import FileDevice
    from weftplan.storage import AutoGrowth

    place = FileDevice(device.Context("file", 0), str(tmp_path), limit=64 << 20)
    before = registry.put(place)
    with storage.using(AutoGrowth(place)):
        yield tmp_path
    registry._folders.clear()
    if before is None:
        del registry._devices[place.context]
    else:
        registry.put(before)


@pytest.fixture
def no_links():
    """Remove all links between devices after the test."""
    from weftplan.device.links import connect

    yield
    connect(None)


@pytest.fixture
def clean_environment(monkeypatch):
    """Unset all variables of this package and clear their cache, before and after the test."""
    from weftplan import config

    for name in list(os.environ):
        if name.upper().startswith(("MXNET_", "NNVM_", "FLAGS_", "WEFTPLAN_")) or name == "enable_inplace":
            monkeypatch.delenv(name)
    config._reset_for_tests()
    yield
    config._reset_for_tests()


@pytest.fixture
def four_cores(monkeypatch):
    """Simulate a machine with four cores and no variables for thread counts."""
    from weftplan import config
    from weftplan.support import blas_threads, core_sharing

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(core_sharing.VARIABLE, raising=False)
    config._reset_for_tests()
    monkeypatch.setattr(blas_threads, "usable_cpus", lambda: 4)
    yield
    config._reset_for_tests()


def put_back():
    """Reset process-wide state after a file's tests, so that no other file depends on it.

    The state is unfinished work, links between devices, the hardware of simulated devices, and the profiler.
    """
    from weftplan import profiler
    from weftplan.device import registry
    from weftplan.device.interconnect import declare
    from weftplan.device.links import connect
    from weftplan.device.simulated_device import CostModel, SimDevice
    from weftplan.engine import factory

    if factory._process.current is not None:
        factory._process.current.settle(60)
    connect(None)
    declare(None)
    for place in list(registry._devices.values()):
        if isinstance(place, SimDevice):
            with contextlib.suppress(Exception):  # raised by work that failed on purpose
                place.synchronize()
            place.configure(
                cost=CostModel(), order="lazy", seed=0, capacity=max(place.used, SimDevice(place.context).capacity)
            )
    profiler.set_state("stop")
    profiler.recorder.clear()
    profiler._config.update(profiler._SETTINGS)


def set_aside():
    """Exclude all live objects from later garbage collections."""
    gc.collect()
    gc.freeze()
