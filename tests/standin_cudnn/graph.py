"""``cudnn.pygraph`` of the stand-in: single convolutions, built step by step, computed by NumPy."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tests.standin_cupy.machine import lock, machine, thread
from tests.standin_cupy.memory import Memory, enqueue
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import capturable, get_current_stream
from weftplan.locks import members

DTYPES = {"FLOAT": np.dtype(np.float32), "HALF": np.dtype(np.float16), "DOUBLE": np.dtype(np.float64)}
STEPS = ("made", "validated", "lowered", "planned", "supported", "built")


class NotSupported(RuntimeError):
    """``cudnn.cudnnGraphNotSupportedError``."""


class Plan(NamedTuple):
    """An algorithm of the stand-in.

    ``share`` is its scratch relative to the image's bytes, ``time`` is in milliseconds, and ``notes`` are its numerical
    notes.
    """

    name: str
    share: float
    time: float
    notes: tuple[str, ...] = ()


recommended = [
    Plan("tensor", 1.0, 1.0, ("TENSOR_CORE",)),
    Plan("atomic", 0.0, 0.5, ("NONDETERMINISTIC",)),
    Plan("large", 2.0, 3.0),
    Plan("quick", 4.0, 2.0),
    Plan("plain", 0.0, 5.0),
]
"""Algorithms in the recommended order."""


class Tensor:
    """A tensor: ``graph.tensor(…)`` or the output of a node."""

    def __init__(self, dim: Sequence[int], stride: Sequence[int], data_type: Any, name: str) -> None:
        self.dim, self.stride, self.data_type, self.name = list(dim), list(stride), data_type, name
        self.uid = 0
        self.output = False

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def set_output(self, value: bool) -> Tensor:
        self.output = value
        return self

    def set_data_type(self, dtype: Any) -> Tensor:
        self.data_type = dtype
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self


class Graph:
    """A graph of one convolution."""

    cudnn: ClassVar[Any]

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Any = None,
    ) -> None:
        assert handle is not None, "lowering a graph needs a handle"
        self._handle = handle
        self._io, self._compute = io_data_type, compute_data_type
        self._step = 0
        self._inputs: list[Tensor] = []
        self._node: tuple[str, list[int], list[int], list[int], Tensor, Tensor, Tensor] | None = None
        self._barred: set[str] = set()
        self._limit = math.inf
        self._built: int | None = None
        self._sized: set[int] = set()

    def tensor(self, dim: list[int], stride: list[int] | None = None, data_type: Any = None, name: str = "") -> Tensor:
        """Return a new input tensor; strides are required."""
        assert stride is not None, "the stand-in wants strides"
        result = Tensor(dim, stride, data_type, name)
        self._inputs.append(result)
        return result

    def conv_fprop(
        self, image: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        """Return the output tensor of a convolution."""
        result = Tensor([], [], None, "Y")
        self._node = ("fprop", padding, stride, dilation, image, weight, result)
        return result

    def conv_dgrad(
        self, loss: Tensor, filter: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        """Return the gradient of the image."""
        result = Tensor([], [], None, "DX")
        self._node = ("dgrad", padding, stride, dilation, result, filter, loss)
        return result

    def conv_wgrad(
        self, image: Tensor, loss: Tensor, padding: list[int], stride: list[int], dilation: list[int]
    ) -> Tensor:
        """Return the gradient of the weight."""
        result = Tensor([], [], None, "DW")
        self._node = ("wgrad", padding, stride, dilation, image, result, loss)
        return result

    def _next(self, step: str) -> None:
        assert self._step == STEPS.index(step) - 1, f"{step} behind {STEPS[self._step]}: the steps have an order"
        self._step += 1

    def validate(self) -> None:
        """Check that all sizes, strides and dtypes are set and consistent."""
        self._next("validated")
        assert self._node is not None
        _, padding, stride, dilation, image, weight, grid = self._node
        rank = len(image.dim) - 2
        assert rank in (2, 3), f"{rank} spatial axes"
        if [len(x) for x in (padding, stride, dilation)] != [rank] * 3:
            raise ValueError(f"padding {padding}, stride {stride}, dilation {dilation} for {rank} axes")
        for thing in (image, weight, grid):
            assert thing.uid > 0, f"{thing.name} has no uid"
            assert thing.data_type is self._io, f"{thing.name} has {thing.data_type}"
            want = [math.prod(thing.dim[k + 1 :]) for k in range(len(thing.dim))]
            if thing.stride != want:
                raise ValueError(f"{thing.name}: strides {thing.stride} of {thing.dim}: the stand-in knows {want}")
        if image.dim[1] % weight.dim[1] or weight.dim[0] % (image.dim[1] // weight.dim[1]):
            raise ValueError(f"channels of {image.dim} and {weight.dim}")
        for k in range(rank):
            span = dilation[k] * (weight.dim[k + 2] - 1) + 1
            if (image.dim[k + 2] + 2 * padding[k] - span) // stride[k] + 1 != grid.dim[k + 2]:
                raise ValueError(f"axis {k}: {image.dim} and {weight.dim} do not make {grid.dim}")
        if (grid.dim[0], grid.dim[1]) != (image.dim[0], weight.dim[0]):
            raise ValueError(f"{grid.dim} is no grid of {image.dim} and {weight.dim}")

    def build_operation_graph(self) -> None:
        """Lower the graph."""
        self._next("lowered")

    def create_execution_plans(self, heuristics: list[Any]) -> None:
        """Create execution plans; raise NotSupported for float64."""
        self._next("planned")
        assert all(isinstance(mode, self.cudnn.heur_mode) for mode in heuristics)
        if self._io.name == "DOUBLE":
            raise NotSupported("No valid engine configs for CONVOLUTION in DOUBLE")

    def deselect_numeric_notes(self, notes: list[Any]) -> Graph:
        """Exclude plans with any of these notes."""
        assert self._step == STEPS.index("planned")
        assert all(isinstance(note, self.cudnn.numerical_note) for note in notes)
        self._barred |= {note.name for note in notes}
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> Graph:
        """Exclude plans that need more workspace, in bytes."""
        self._limit = workspace_limit
        return self

    def check_support(self) -> None:
        """Raise NotSupported if all plans are excluded."""
        self._next("supported")
        if not any(self._allowed(k) for k in range(len(recommended))):
            raise NotSupported("no plan is left")

    def _allowed(self, index: int) -> bool:
        return not self._barred & set(recommended[index].notes) and self._bytes(index) <= self._limit

    def _bytes(self, index: int) -> int:
        assert self._node is not None
        return int(recommended[index].share * math.prod(self._node[4].dim) * DTYPES[self._io.name].itemsize)

    def build_plans(self, policy: Any) -> None:
        """Build the first plan that is not excluded."""
        self._next("built")
        assert policy is self.cudnn.build_plan_policy.HEURISTICS_CHOICE
        self._built = next(k for k in range(len(recommended)) if self._allowed(k))

    def get_workspace_size(self) -> int:
        """Return the workspace in bytes of the last built plan."""
        assert self._built is not None, "Call build() first"
        return self._bytes(self._built)

    def get_execution_plan_count(self) -> int:
        """Return the number of all plans, including excluded plans."""
        assert self._step >= STEPS.index("planned")
        return len(recommended)

    def build_plan_at_index(self, index: int) -> Graph:
        """Build the plan ``index``; raise ValueError if it is excluded."""
        if not self._allowed(index):
            raise ValueError(f"plan {index} is excluded by a note filter")
        self._sized.add(index)
        self._built = index
        return self

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Return the workspace in bytes of the plan ``index``, which must be built."""
        assert index in self._sized, f"plan {index} is not built"
        return self._bytes(index)

    def execute(self, tensor_dict: dict[int, int], workspace: Any = None, handle: Any = None) -> None:
        """Run the last built plan; ``tensor_dict`` maps uids to addresses."""
        assert self._built is not None
        _check(handle)
        self._run(tensor_dict, workspace, self._built)

    def execute_plan_at_index(
        self, tensor_dict: dict[int, int], workspace: Any = None, index: int = 0, handle: Any = None
    ) -> None:
        """Run the plan ``index``, which must be built."""
        assert index in self._sized
        _check(handle)
        self._run(tensor_dict, workspace, index)

    @capturable
    def _run(self, places: dict[int, int], workspace: int | None, index: int) -> None:
        assert self._node is not None
        kind, padding, stride, dilation, *things = self._node
        missing = {thing.uid for thing in things} - set(places)
        if missing:
            raise ValueError(f"the variant pack is missing a buffer for tensor uids {missing}")
        dtype = DTYPES[self._io.name]
        image, weight, grid = (_array(places[t.uid], t.dim, dtype) for t in things)
        spans = [_span(places[t.uid], math.prod(t.dim) * dtype.itemsize) for t in things]
        target = ("dgrad", "wgrad", "fprop").index(kind)
        reads = [span for k, span in enumerate(spans) if k != target]
        need = self._bytes(index)
        scratch = []
        if need:
            assert type(workspace) is int, f"the plan needs {need} bytes of workspace, got {workspace!r}"
            scratch = [_span(workspace, need)]
            for memory, start, stop in spans:
                apart = memory is not scratch[0][0] or stop <= scratch[0][1] or scratch[0][2] <= start
                assert apart, "operands as scratch"
        enqueue(f"cudnn {kind}", reads, [spans[target], *scratch])
        with lock:
            machine.clock += recommended[index].time
        if meter.dry:
            return
        if need:
            memory, start, stop = scratch[0]
            memory.bytes[start:stop] = 0xA5
        with np.errstate(all="ignore"):
            (image, weight, grid)[target][...] = convolve(kind, image, weight, grid, padding, stride, dilation)


def _check(handle: Any) -> None:
    """Check that the handle belongs to this thread and device and has the current stream.

    A captured graph is not checked again.
    """
    assert handle.thread == threading.get_ident(), "the handle of another thread"
    assert handle.device == thread.device, f"a handle of gpu({handle.device}) on gpu({thread.device})"
    assert handle.stream == get_current_stream().ptr, "the handle has the stream of an earlier call"


def _memory(address: int) -> Memory:
    for memory in members(machine.memories):
        if memory.device_id == thread.device and memory.ptr <= address < memory.ptr + memory.size:
            return memory
    raise AssertionError(f"{address:#x} is no memory of gpu({thread.device})")


def _span(address: int, nbytes: int) -> tuple[Memory, int, int]:
    assert type(address) is int, f"an address, got {address!r}"
    assert address % 16 == 0, f"cuDNN wants addresses aligned to 16 bytes, got {address:#x}"
    memory = _memory(address)
    start = address - memory.ptr
    assert start + nbytes <= memory.size, "beyond the end of the memory"
    return memory, start, start + nbytes


def _array(address: int, dim: list[int], dtype: np.dtype[Any]) -> np.ndarray:
    memory, start, stop = _span(address, math.prod(dim) * dtype.itemsize)
    return memory.bytes[start:stop].view(dtype).reshape(dim)


def convolve(kind: str, image: Any, weight: Any, grid: Any, pad: Any, stride: Any, dilate: Any) -> np.ndarray:
    """Return the result of a pass in float64, tap by tap; ``kind`` is fprop, dgrad or wgrad."""
    groups = image.shape[1] // weight.shape[1]
    wide = np.pad(image.astype(np.float64), [(0, 0), (0, 0), *((p, p) for p in pad)])
    shaped = wide.reshape(wide.shape[0], groups, -1, *wide.shape[2:])
    kernel = weight.astype(np.float64).reshape(groups, -1, *weight.shape[1:])
    out = grid.astype(np.float64).reshape(grid.shape[0], groups, -1, *grid.shape[2:])
    if kind == "fprop":
        out = np.zeros_like(out)
    elif kind == "dgrad":
        shaped = np.zeros_like(shaped)
    else:
        kernel = np.zeros_like(kernel)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        place = (slice(None), slice(None), slice(None), *(
            slice(t * d, t * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(tap, dilate, stride, grid.shape[2:], strict=True)
        ))  # fmt: skip
        part = (slice(None), slice(None), slice(None), *tap)
        if kind == "fprop":
            out += np.einsum("ngc...,gkc->ngk...", shaped[place], kernel[part])
        elif kind == "dgrad":
            shaped[place] += np.einsum("ngk...,gkc->ngc...", out, kernel[part])
        else:
            kernel[part] = np.einsum("ngcz,ngkz->gkc", *(x.reshape(*x.shape[:3], -1) for x in (shaped[place], out)))
    if kind == "fprop":
        return out.reshape(grid.shape)
    if kind == "wgrad":
        return kernel.reshape(weight.shape)
    inner = tuple(slice(p, p + n) for p, n in zip(pad, image.shape[2:], strict=True))
    return shaped.reshape(wide.shape)[(slice(None), slice(None), *inner)]
