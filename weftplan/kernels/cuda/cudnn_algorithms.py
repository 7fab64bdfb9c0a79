"""Convolutions by cuDNN: choose an algorithm for each problem, and run it as a cuDNN graph of one node.

``nvidia-cudnn-frontend`` (imported as ``cudnn``) and cuDNN itself are imported when the first convolution is planned.
An algorithm is chosen once for each device, problem, tuning and workspace limit, and cached for the life of the
process. Algorithms whose results vary from run to run are excluded, and algorithms that round float32 to TF32 are
excluded unless the settings allow them.

Any thread may plan and run. Each thread has its own handles, because a handle refers to one stream at a time.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from types import ModuleType
from typing import Any, NamedTuple

from weftplan.errors import DeviceError
from weftplan.ops.core.cuda_gemm import pointer
from weftplan.ops.core.cuda_tuning import FASTEST, OFF, Tuning, planned_gpu
from weftplan.ops.core.schema import Shape
from weftplan.support.array_types import ArrayModule, RawArray

IMAGE, WEIGHT, GRID = 1, 2, 3
"""Ids of the tensors of a convolution, of shapes (batch, channels, …), (filters, channels of a group, …) and (batch,
filters, …)."""
_TARGET = {"fprop": GRID, "dgrad": IMAGE, "wgrad": WEIGHT}
_DTYPES = {"float16": ("HALF", "FLOAT"), "float32": ("FLOAT", "FLOAT"), "float64": ("DOUBLE", "DOUBLE")}
"""By dtype, cuDNN's types of the data and of sums."""
TRIED = 10
"""Maximum number of recommended algorithms that are measured."""
_ROUNDS = 5
"""Runs of an algorithm that is measured; the fastest counts, because other work on the GPU only adds time."""
_NO_LIMIT = 1 << 62
"""More scratch bytes than a device has."""


class CudnnProblem(NamedTuple):
    """One convolution over two or three spatial axes.

    Attributes:
        kind: the result: ``fprop`` for the grid of windows, ``dgrad`` for the image's gradient, ``wgrad`` for the
            weight's gradient.
    """

    kind: str
    image: Shape
    weight: Shape
    grid: Shape
    stride: Shape
    dilate: Shape
    pad: Shape
    dtype: str


class Algorithm:
    """The chosen cuDNN plan for one problem on one device."""

    def __init__(self, graph: Any, index: int | None, workspace: int) -> None:
        self._graph = graph
        self.index = index
        """Index of the plan in the graph's recommended plans; None: the only plan that was built."""
        # Held while an execution is enqueued, because threads share the graph.
        self._lock = threading.Lock()
        self.workspace = workspace
        """Scratch bytes."""

    def run(
        self, xp: ArrayModule, image: RawArray, weight: RawArray, grid: RawArray, workspace: RawArray | None
    ) -> None:
        """Enqueue the algorithm on the current stream; arrays are contiguous, and an unneeded ``workspace`` is None."""
        pointers = {IMAGE: pointer(image), WEIGHT: pointer(weight), GRID: pointer(grid)}
        self.enqueue(xp, pointers, None if workspace is None else pointer(workspace))

    def enqueue(self, xp: ArrayModule, pointers: dict[int, int], workspace: int | None) -> None:
        """Enqueue the algorithm on the current stream, given the address of each tensor id and of the workspace."""
        handle = _handle(xp)
        with self._lock:
            if self.index is None:
                self._graph.execute(pointers, workspace, handle)
            else:
                self._graph.execute_plan_at_index(pointers, workspace, self.index, handle)


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}


_handles = _Handles()
_lock = threading.RLock()
"""Held while an algorithm is chosen, so that measurements do not disturb each other; guards the caches below.
Reentrant: a measurement allocates, and a collection then may run a finalizer that plans."""
_MISSING = "cuDNN is not installed: pip install 'weftplan[cudnn12]' or 'weftplan[cudnn13]'"
_absent: list[bool] = []
"""Not empty after a failed import of cuDNN, which is not tried again: it takes as long as planning a node."""
_algorithms: dict[tuple[Any, ...], Algorithm | str] = {}
_fastest_of: dict[tuple[Any, ...], int] = {}
"""Index of the fastest plan, by model of GPU, problem, tuning and limit. GPUs of one model share it, so that they
compute the same bits and only one is measured."""
_planned: dict[tuple[CudnnProblem, int], Tuning] = {}
"""Settings of the last plan of each problem, which its runs use in place of the current settings."""


def forget() -> None:
    """Drop all cached choices, and the handles of this thread."""
    with _lock:
        _algorithms.clear()
        _fastest_of.clear()
        _planned.clear()
        _absent.clear()
        _handles.by_device.clear()


def _library() -> ModuleType:
    return importlib.import_module("cudnn")


def _handle(xp: ArrayModule) -> object:
    """Return this thread's handle for the current device, set to the current stream."""
    cudnn = _library()
    device = xp.cuda.runtime.getDevice()
    handle = _handles.by_device.get(device)
    if handle is None:
        handle = _handles.by_device[device] = cudnn.create_handle()
    cudnn.set_stream(handle, int(xp.cuda.get_current_stream().ptr))
    return handle


def plan(problem: CudnnProblem, tuning: Tuning, limit: int) -> Algorithm | str:
    """Return the algorithm for a problem with at most ``limit`` scratch bytes, or the reason why there is none.

    It is chosen on the GPU that the node is planned for, if any, otherwise on the current GPU. If the settings ask for
    the fastest algorithm, there is no limit.
    """
    try:
        if _absent and "cudnn" not in sys.modules:
            return _MISSING
        cudnn, xp = _library(), importlib.import_module("cupy")
    except ImportError:
        _absent.append(True)
        return _MISSING
    _planned[problem, limit] = tuning
    scratch_limit = _NO_LIMIT if tuning.autotune == FASTEST else limit
    gpu = planned_gpu()
    if gpu is None:
        return _find(cudnn, xp, problem, tuning, scratch_limit)
    try:
        with xp.cuda.Device(gpu):
            return _find(cudnn, xp, problem, tuning, scratch_limit)
    except xp.cuda.runtime.CUDARuntimeError as error:
        return f"there is no GPU {gpu} to ask cuDNN for: {error}"


def _find(cudnn: ModuleType, xp: ArrayModule, problem: CudnnProblem, tuning: Tuning, limit: int) -> Algorithm | str:
    """Return the algorithm for a problem on the current GPU, cached or chosen now, or the reason why there is none."""
    try:
        key = (cudnn, xp.cuda.runtime.getDevice(), problem, tuning, limit)
    except xp.cuda.runtime.CUDARuntimeError as error:
        return f"there is no GPU to ask cuDNN for: {error}"
    # Without the lock: entries never change, so a cached entry is final.
    algorithm = _algorithms.get(key)
    if algorithm is not None:
        return algorithm
    # One thread chooses at a time, so that measurements do not disturb each other. Look again: another thread may have
    # chosen while this thread waited.
    with _lock:
        try:
            algorithm = _algorithms.get(key) or _choose(cudnn, xp, problem, tuning, limit)
        except cudnn.cudnnGraphNotSupportedError as error:
            algorithm = f"cuDNN has no algorithm: {' '.join(str(error).split())[:200]}"
        except (RuntimeError, OSError, ImportError) as error:  # cuDNN does not load, or does not fit the driver
            algorithm = f"cuDNN cannot be used: {' '.join(str(error).split())[:200]}"
        _algorithms[key] = algorithm
        return algorithm


def _graph(cudnn: ModuleType, xp: ArrayModule, problem: CudnnProblem) -> Any:
    """Return the cuDNN graph of a problem with its recommended plans, before any plan is built."""
    kind, acc = (getattr(cudnn.data_type, name) for name in _DTYPES[problem.dtype])
    graph = cudnn.pygraph(
        name=problem.kind, io_data_type=kind, intermediate_data_type=acc, compute_data_type=acc, handle=_handle(xp)
    )
    shapes = {IMAGE: problem.image, WEIGHT: problem.weight, GRID: problem.grid}
    target = _TARGET[problem.kind]
    tensors = {
        uid: graph.tensor(dim=list(shape), stride=_strides(shape), data_type=kind, name=f"tensor{uid}").set_uid(uid)
        for uid, shape in shapes.items()
        if uid != target
    }
    how = {"padding": list(problem.pad), "stride": list(problem.stride), "dilation": list(problem.dilate)}
    if problem.kind == "fprop":
        result = graph.conv_fprop(image=tensors[IMAGE], weight=tensors[WEIGHT], **how)
    elif problem.kind == "dgrad":
        result = graph.conv_dgrad(loss=tensors[GRID], filter=tensors[WEIGHT], **how)
    else:
        result = graph.conv_wgrad(image=tensors[IMAGE], loss=tensors[GRID], **how)
    shape = shapes[target]
    result.set_output(True).set_data_type(kind).set_dim(list(shape)).set_stride(_strides(shape)).set_uid(target)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph


def _choose(cudnn: ModuleType, xp: ArrayModule, problem: CudnnProblem, tuning: Tuning, limit: int) -> Algorithm:
    """Return the fastest algorithm by measurement if the tuning asks for it, otherwise cuDNN's recommendation."""
    graph = _graph(cudnn, xp, problem)
    notes = cudnn.numerical_note
    refused = [notes.NONDETERMINISTIC]
    if problem.dtype != "float16":
        refused += [notes.DOWN_CONVERT_INPUTS, notes.REDUCED_PRECISION_REDUCTION]
        if not tuning.tensor_cores:
            refused.append(notes.TENSOR_CORE)
    graph.deselect_numeric_notes(refused)
    if tuning.autotune != OFF:
        model = bytes(xp.cuda.runtime.getDeviceProperties(xp.cuda.runtime.getDevice())["name"])
        key = (model, problem, tuning, limit)
        index = _fastest_of.get(key)
        if index is not None:
            graph.build_plan_at_index(index)
            return Algorithm(graph, index, int(graph.get_workspace_size_plan_at_index(index)))
        best = _fastest(cudnn, xp, graph, problem, limit)
        if best is not None:
            assert best.index is not None
            _fastest_of[key] = best.index
            return best
        graph = _graph(cudnn, xp, problem)
        graph.deselect_numeric_notes(refused)
    graph.deselect_workspace_greater_than(limit)
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    return Algorithm(graph, None, int(graph.get_workspace_size()))


def _fastest(cudnn: ModuleType, xp: ArrayModule, graph: Any, problem: CudnnProblem, limit: int) -> Algorithm | None:
    """Return the fastest of the first :data:`TRIED` plans that need at most ``limit`` scratch bytes.

    None if none of them can be run, for example because there is no memory for the arrays.
    """
    memory = xp.cuda.Memory
    item = {"float16": 2, "float32": 4, "float64": 8}[problem.dtype]
    try:
        arrays = [memory(max(1, math.prod(shape) * item)) for shape in (problem.image, problem.weight, problem.grid)]
    except (xp.cuda.memory.OutOfMemoryError, xp.cuda.runtime.CUDARuntimeError):
        return None
    pointers = dict(zip((IMAGE, WEIGHT, GRID), (int(array.ptr) for array in arrays), strict=True))
    best: tuple[float, Algorithm] | None = None
    for index in range(min(TRIED, graph.get_execution_plan_count())):
        try:
            graph.build_plan_at_index(index)
            need = int(graph.get_workspace_size_plan_at_index(index))
            scratch = memory(need) if 0 < need <= limit else None
        except (cudnn.cudnnGraphNotSupportedError, ValueError):  # not supported on this GPU, or excluded
            continue
        except (xp.cuda.memory.OutOfMemoryError, xp.cuda.runtime.CUDARuntimeError):
            continue
        if need > limit:
            continue
        candidate = Algorithm(graph, index, need)
        time = min(
            _timed(xp, candidate, pointers, None if scratch is None else int(scratch.ptr)) for _ in range(_ROUNDS)
        )
        if best is None or time < best[0]:
            best = (time, candidate)
    return None if best is None else best[1]


def _timed(xp: ArrayModule, algorithm: Algorithm, pointers: dict[int, int], scratch: int | None) -> float:
    """Return the milliseconds of one run on the device, measured by events."""
    start, stop = xp.cuda.Event(), xp.cuda.Event()
    start.record()
    algorithm.enqueue(xp, pointers, scratch)
    stop.record()
    stop.synchronize()
    return float(xp.cuda.get_elapsed_time(start, stop))


def _strides(shape: Shape) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def run(
    xp: ArrayModule,
    problem: CudnnProblem,
    limit: int,
    arrays: tuple[RawArray, RawArray, RawArray],
    scratch: RawArray | None,
) -> None:
    """Enqueue a problem with the algorithm of its plan; ``scratch`` is the planned workspace, or None.

    If this GPU is not of the planned model, the algorithm may need more scratch. An algorithm that fits then replaces
    it.

    Raises:
        DeviceError: no algorithm fits the scratch.
    """
    cudnn = _library()
    have = 0 if scratch is None else scratch.size
    tuning = _planned.get((problem, limit), Tuning())
    algorithm = _find(cudnn, xp, problem, tuning, _NO_LIMIT if tuning.autotune == FASTEST else limit)
    if isinstance(algorithm, Algorithm) and algorithm.workspace > have:
        algorithm = _find(cudnn, xp, problem, Tuning(OFF, tuning.tensor_cores), have)
    if isinstance(algorithm, str):
        raise DeviceError(f"a convolution was planned for cuDNN with {have:,} bytes of scratch, and now {algorithm}")
    algorithm.run(xp, *arrays, scratch if algorithm.workspace else None)
