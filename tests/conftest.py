"""What holds for all tests."""

import contextlib
import gc
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.support.checkout import share_checkout
from tests.support.seeds import FRESH

share_checkout(Path(__file__).resolve().parents[1], os.environ)

if sys.dont_write_bytecode:
    # Nothing is to be written beside the sources. But the tests start hundreds of processes, and each would compile the
    # package again, so all of them keep what they have compiled in pytest's own folder.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(
        Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    )
    sys.dont_write_bytecode = False
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""

os.environ.setdefault("WEFTPLAN_PROGRESS", "0")  # on a busy machine a loop of a child could take long enough to tell

settings.register_profile(
    "weftplan", deadline=None, derandomize=not FRESH, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("weftplan")
"""No limit of time for one example: on a loaded machine a test must not fail for being slow."""

if "forkserver" in multiprocessing.get_all_start_methods():
    # What every child would import again, as its parent's main module or for the tests' datasets.
    multiprocessing.set_forkserver_preload(["pytest", "weftplan.training.data.iterators"])

collect_ignore_glob = ["golden/*.py", "*/golden/*.py"]
"""Scripts that make golden files; they run with MXNet's interpreter, not under pytest."""


def pytest_addoption(parser):
    """``--first-contact``: of the tests of a GPU those of the first minutes with a card, in their order."""
    parser.addoption(
        "--first-contact",
        action="store_true",
        help="run tests/first_contact alone, and write its page",
    )


def pytest_collection_modifyitems(config, items):
    """With ``--first-contact``, leave everything else out."""
    if config.getoption("--first-contact"):
        chosen = [item for item in items if item.path.name == "test_first_contact.py"]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection(session):
    """Collecting twenty thousand tests makes no garbage worth looking for."""
    gc.disable()


def pytest_collection_finish(session):
    """The tests themselves are no garbage: a test that collects garbage need not look through all the others."""
    set_aside()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor through what the files before it keep: plans, networks, results that fixtures hold."""
    if nextitem is None or nextitem.path != item.path:
        if "weftplan.device.simulated_device" in sys.modules:
            put_back()
        set_aside()


@pytest.fixture(autouse=True, scope="session")
def short_searches():
    """What to compute again is searched for with few prices: what the tests say of plans, budgets and curves holds
    however well was searched. Who says how well asks for `whole_searches`."""
    from weftplan.planner.recompute import archive, trade_off

    whole = archive.MOST_PRICES, trade_off.EXHAUSTIVE
    archive.MOST_PRICES, trade_off.EXHAUSTIVE = 100, 6
    yield whole
    archive.MOST_PRICES, trade_off.EXHAUSTIVE = whole


@pytest.fixture(autouse=True)
def numpy_without_a_seed():
    """A test that seeds NumPy's global generator decides the orders of its own iterators alone."""
    np.random.set_bit_generator(np.random.MT19937(0))


@pytest.fixture(autouse=True, scope="session")
def no_plans_from_before():
    """The tests of this process plan; what an earlier run has kept would test that run."""
    from weftplan.executor import plan_cache

    plan_cache._CODE = ""


@pytest.fixture
def whole_searches(short_searches, monkeypatch):
    """Searches as long as for a user."""
    from weftplan.planner.recompute import archive, trade_off

    monkeypatch.setattr(archive, "MOST_PRICES", short_searches[0])
    monkeypatch.setattr(trade_off, "EXHAUSTIVE", short_searches[1])


@pytest.fixture
def folder(tmp_path):
    """A folder of the test, of which ``file(0)`` is the memory."""
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
    """No links between devices once the test is over."""
    from weftplan.device.links import connect

    yield
    connect(None)


@pytest.fixture
def clean_environment(monkeypatch):
    """No variable of ours set, nothing remembered, before and after the test."""
    from weftplan import config

    for name in list(os.environ):
        if name.upper().startswith(("MXNET_", "NNVM_", "FLAGS_", "WEFTPLAN_")) or name == "enable_inplace":
            monkeypatch.delenv(name)
    config._reset_for_tests()
    yield
    config._reset_for_tests()


@pytest.fixture
def four_cores(monkeypatch):
    """As on a machine with four cores, with no variable that speaks of threads."""
    from weftplan import config
    from weftplan.support import blas_threads, core_sharing

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(core_sharing.VARIABLE, raising=False)
    config._reset_for_tests()
    monkeypatch.setattr(blas_threads, "usable_cpus", lambda: 4)
    yield
    config._reset_for_tests()


def put_back():
    """What a file's tests have left in the whole process ends with the file, or another file could depend on it: work
    that nobody has waited for, links between devices, the hardware that simulated devices stand for, the profiler."""
    from weftplan import profiler
    from weftplan.device import registry
    from weftplan.device.interconnect import declare
    from weftplan.device.links import connect
    from weftplan.device.simulated_device import CostModel, SimDevice
    from weftplan.engine import factory

    if factory._current is not None:
        factory._current.settle(60)
    connect(None)
    declare(None)
    for place in list(registry._devices.values()):
        if isinstance(place, SimDevice):
            with contextlib.suppress(Exception):  # of work that failed on purpose
                place.synchronize()
            place.configure(
                cost=CostModel(), order="lazy", seed=0, capacity=max(place.used, SimDevice(place.context).capacity)
            )
    profiler.set_state("stop")
    profiler.recorder.clear()
    profiler._config.update(profiler._KNOWN)


def set_aside():
    """Let the collector forget whatever is alive."""
    gc.collect()
    gc.freeze()
