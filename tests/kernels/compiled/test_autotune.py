"""Implementations chosen by measuring: the measured candidates, the cache, and stable later choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.kernels.compiled.target import host
from weftplan.ops import autotune
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import Implementation, KernelChoice, choose, numpy_of, provided
from weftplan.ops.core.schema import TensorSpec
from weftplan.planner import PlanOptions, plan_symbol

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
F32 = np.dtype(np.float32)
DATA, WEIGHT, OUT = TensorSpec((1, 3, 8, 8), F32), TensorSpec((4, 3, 3, 3), F32), TensorSpec((1, 4, 6, 6), F32)


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of an empty cache folder, and clear this process's known measurements."""
    monkeypatch.setattr(autotune, "_cached", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weftplan" / "kernels"


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return fake measurements by implementation, in seconds; ``calls`` counts the measurements."""
    by_name = {"numpy": 2.0, "native": 1.0, "calls": 0.0}

    def fake(*_: Any, choices: list[Implementation]) -> dict[str, float]:
        by_name["calls"] += 1
        return {one.name: by_name[one.name] for one in choices}

    monkeypatch.setattr(autotune, "_measured", fake)
    return by_name


def choice(tune: int, **settings: Any) -> KernelChoice:
    """Return the tuned choice for one convolution at the autotune level ``tune``."""
    op = registry.get("Convolution")
    inputs = {"kernel": (3, 3), "num_filter": 4, "no_bias": True, **settings}
    params = registry.parse_params(op, inputs)
    first = choose(op, params, [DATA, WEIGHT], [OUT], "auto")
    return autotune.tuned(op, params, [DATA, WEIGHT], [OUT], tune=tune, heuristic=first)


def test_the_faster_one_is_chosen(cache_folder: Path, seconds: dict[str, float]):
    """Level 2 chooses the faster implementation; level 0 chooses by the heuristic without measuring."""
    assert choice(2).text == "native (measured)"
    autotune._cached.clear()
    for file in cache_folder.glob("*/*"):
        file.unlink()
    seconds["native"] = 3.0
    assert choice(2).text == "numpy (measured)"
    assert seconds["calls"] == 2
    assert choice(0).text == "native"
    assert seconds["calls"] == 2


def test_all_that_can_compute_a_call_are_asked(cache_folder: Path, seconds: dict[str, float]):
    """All three implementations of a convolution are measured, and the fastest is chosen."""
    op = registry.get("Convolution")
    params = registry.parse_params(op, {"kernel": (3, 3), "num_filter": 32, "no_bias": True})
    specs = [TensorSpec((4, 32, 12, 12), F32), TensorSpec((32, 32, 3, 3), F32)], [TensorSpec((4, 32, 10, 10), F32)]
    first = choose(op, params, *specs, "auto")
    assert first.text == "winograd"
    for fastest in ("winograd", "native", "numpy"):
        autotune._cached.clear()
        for file in cache_folder.glob("*/*"):
            file.unlink()
        seconds.update({"winograd": 3.0, "native": 3.0, "numpy": 3.0, fastest: 1.0})
        assert autotune.tuned(op, params, *specs, tune=2, heuristic=first).text == f"{fastest} (measured)"


def test_what_was_measured_is_kept(cache_folder: Path, seconds: dict[str, float]):
    """Neither a second call nor another process that finds the file measures again; the choice is the same."""
    assert choice(2).implementation.name == choice(2).implementation.name == "native"
    assert seconds["calls"] == 1
    assert len(list(cache_folder.glob("*/*"))) == 1
    seconds["native"] = 3.0
    autotune._cached.clear()  # as in another process
    assert choice(2).implementation.name == "native"
    assert seconds["calls"] == 1


@pytest.mark.parametrize("damage", ["cut", "others", "numbers", "words"])
def test_damaged_files_are_measured_again(damage: str, cache_folder: Path, seconds: dict[str, float]):
    """A damaged cache file, or a file without positive seconds of both implementations, is ignored and replaced."""
    choice(2)
    (file,) = cache_folder.glob("*/*")
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-3])
    else:
        wrong: Any = {"others": {"numpy": 1.0}, "numbers": {"numpy": 1.0, "native": -1.0}, "words": ["numpy"]}[damage]
        autotune.user_cache.keep(cache_folder, file.name, json.dumps(wrong).encode())
    autotune._cached.clear()
    assert choice(2).implementation.name == "native"
    assert seconds["calls"] == 2
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written(cache_folder: Path, seconds: dict[str, float]):
    """If the cache folder cannot be created, the choice is still measured once, without an error."""
    cache_folder.parent.write_text("a file where the folder would be")
    assert choice(2).implementation.name == "native"
    assert choice(2).implementation.name == "native"
    assert seconds["calls"] == 1


def test_the_workspace_limit(cache_folder: Path, seconds: dict[str, float]):
    """Level 1 excludes implementations above the node's workspace limit; level 2 does not.

    If none fits, all are measured.
    """
    seconds["numpy"] = 0.5
    assert choice(1).text == choice(2).text == "numpy (measured)"
    op = registry.get("Convolution")
    params = registry.parse_params(op, {"kernel": (3, 3), "num_filter": 4, "no_bias": True})
    native = provided()[op.name].otherwise
    assert native is not None
    sizes = {one.name: one.workspace(params, [DATA, WEIGHT], [OUT]) for one in (numpy_of(op), native)}
    assert sizes["numpy"] > 0
    assert sizes["native"] > 0
    assert choice(1, workspace=0).text == "numpy (measured)", "nothing fits, so all are asked"


def test_the_node_comes_first(cache_folder: Path, seconds: dict[str, float]):
    """A convolution's ``cudnn_tune`` overrides the autotune level."""
    assert choice(0, cudnn_tune="fastest").text == "native (measured)"
    assert choice(2, cudnn_tune="off").text == "native"
    assert choice(2, cudnn_tune="limited_workspace").text == "native (measured)"


@pytest.mark.shows("MXNET_CUDNN_AUTOTUNE_DEFAULT")
def test_the_variable_reaches_a_bound_graph(cache_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """MXNET_CUDNN_AUTOTUNE_DEFAULT=1 or 2 marks nodes as measured in ``debug_str``; results agree with those of 0."""
    net = mx.sym.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=4, name="c")
    net = mx.sym.Activation(mx.sym.BatchNorm(net, fix_gamma=False), act_type="relu")
    results = []
    for value in ("0", "1", "2"):
        monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", value)
        executor = net.simple_bind(mx.cpu(), x=(2, 3, 9, 9))
        rng = np.random.default_rng(0)
        for array in executor.arg_arrays:
            array[:] = rng.normal(0, 1, array.shape)
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((2, 4, 7, 7))])
        assert executor.allocated_bytes == executor.planned.memory.peak
        results.append([executor.outputs[0].asnumpy(), *(g.asnumpy() for g in executor.grad_arrays)])
        assert ("(measured)" in executor.debug_str()) == (value != "0")
    assert len(list(cache_folder.glob("*/*"))) >= 4, (
        "four calls; compiled objects, too, unless this process has them already"
    )
    for second in results[1:]:
        for a, b in zip(results[0], second, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_a_chosen_mode_is_not_measured(cache_folder: Path, seconds: dict[str, float]):
    """WEFTPLAN_KERNELS=numpy or native measures nothing, because there is no choice."""
    net = mx.sym.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=4, name="c")
    for kernels in ("numpy", "native"):
        plan_symbol(net, {"x": (2, 3, 9, 9)}, options=PlanOptions(kernels=kernels, autotune=2))
    assert seconds["calls"] == 0
