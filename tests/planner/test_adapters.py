"""The adapters for other compilers in ``examples``: their arenas, and the results of programs that run in them."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Return the module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lanes:
    """The parts of the module ``tinygrad.schedule.memory`` that the adapter uses; a schedule is a list of buffers."""

    class TLSFAllocator:
        """tinygrad's allocator, which the adapter must put back."""

    def memory_plan_rewrite(self, events: list[tuple[str, int]], held_bufs: object = None) -> int:
        """Allocate and free the buffers of ``events`` (name, size; 0 frees) in one lane; return the peak."""
        lane: Any = self.TLSFAllocator(1 << 20, block_size=1, lv2_cnt=32)  # type: ignore[call-arg]
        offsets: dict[str, int] = {}
        peak = 0
        for name, size in events:
            if size:
                offsets[name] = lane.alloc(size)
                peak = max(peak, offsets[name] + size)
            else:
                lane.free(offsets[name])
        return peak


def test_tinygrad_adapter_packs_a_schedule() -> None:
    """The second run of the rewrite gets packed offsets, and tinygrad's allocator is put back."""
    memory = Lanes()
    allocator = memory.TLSFAllocator
    planned = example("tinygrad_memory").planned_with_weftplan(memory)
    events = [("a", 10), ("b", 20), ("a", 0), ("c", 15), ("b", 0), ("d", 20), ("c", 0), ("d", 0)]
    assert planned(events) == 35
    assert memory.TLSFAllocator is allocator


def test_tinygrad_runs_in_packed_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of tinygrad has the same results in arenas that are not larger than its own."""
    monkeypatch.setenv("DEV", "PYTHON")
    tinygrad = pytest.importorskip("tinygrad")
    from tinygrad import schedule
    from tinygrad.schedule import memory

    new_buffer, sizes = memory.UOp.new_buffer, list[int]()

    def counted(device: Any, size: int, dtype: Any, **options: Any) -> Any:
        sizes.append(size)
        return new_buffer(device, size, dtype, **options)

    def run(rewrite: Any) -> tuple[Any, int]:
        rng = np.random.default_rng(0)
        value = tinygrad.Tensor(rng.standard_normal((4, 6)).astype(np.float32)).realize()
        weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((6, 16), (16, 3), (3, 8))]
        tensors = [tinygrad.Tensor(weight).realize() for weight in weights]
        for tensor in tensors:
            value = value.matmul(tensor).contiguous()
            value = value + value.relu().sum(axis=0).contiguous()
        monkeypatch.setattr(schedule, "memory_plan_rewrite", rewrite)
        monkeypatch.setattr(memory.UOp, "new_buffer", counted)
        sizes.clear()
        value.realize()
        arena = sizes[-1]
        monkeypatch.setattr(memory.UOp, "new_buffer", new_buffer)
        return value.numpy(), arena

    own = schedule.memory_plan_rewrite
    expected, theirs = run(own)
    actual, ours = run(example("tinygrad_memory").planned_with_weftplan(memory))
    np.testing.assert_array_equal(actual, expected)
    assert 0 < ours <= theirs


def test_executorch_runs_in_packed_arenas(tmp_path: Path) -> None:
    """ExecuTorch's own runtime computes the eager results in an arena that is smaller than that of its greedy plan."""
    pytest.importorskip("executorch")
    torch = pytest.importorskip("torch")
    from executorch.exir import ExecutorchBackendConfig, to_edge
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.runtime import Runtime

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Convolutions of changing widths with a skip connection."""

        def __init__(self) -> None:
            super().__init__()
            widths = (3, 32, 8, 48, 8, 32)
            self.layers = torch.nn.ModuleList(
                torch.nn.Conv2d(a, b, 3, stride=1 + (b == 48), padding=1) for a, b in pairwise(widths)
            )
            self.skip = torch.nn.Conv2d(8, 32, 1, stride=2)

        def forward(self, x: Any) -> Any:
            """Return the sum of the last layer and a shortcut from the second."""
            kept = x
            for k, layer in enumerate(self.layers):
                x = torch.relu(layer(x))
                kept = x if k == 1 else kept
            return x + self.skip(kept)

    torch.manual_seed(0)
    net, data = Net().eval(), torch.randn(1, 3, 24, 24)
    exported = torch.export.export(net, (data,))
    suite = MemoryPlanningAlgorithmSuite([example("executorch_memory").plan_with_weftplan])
    sizes = []
    for planning in (MemoryPlanningPass(), MemoryPlanningPass(suite)):
        program = to_edge(exported).to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
        sizes.append(sum(program.executorch_program.execution_plan[0].non_const_buffer_sizes))
        path = tmp_path / f"{len(sizes)}.pte"
        path.write_bytes(program.buffer)
        (actual,) = Runtime.get().load_program(path).load_method("forward").execute([data])
        torch.testing.assert_close(actual, net(data), rtol=1e-4, atol=1e-4)
    assert sizes[1] <= sizes[0]
