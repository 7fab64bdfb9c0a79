"""Table of environment variables: data only; :mod:`weftplan.config` reads it.

The file is long because each variable is one row. If the sources disagree on a default, MXNet's documentation wins over
its newest source (``MXNET_EXEC_MATCH_RANGE`` 10, not 16; ``MXNET_GPU_COPY_NTHREADS`` 1, not 2). ``effect`` describes
the effect *here*. It starts with "no effect yet" until a layer reads the variable; the commit that adds the reader
changes the row.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import overload


class When(Enum):
    """When a variable is read; later changes have no effect."""

    PROCESS = "process"
    """Once, when the process-wide object that it configures is created; later changes warn."""
    BIND = "bind"
    """At every bind (or every plan)."""
    CONSTRUCT = "construct"
    """Whenever an object that it configures is created."""


@dataclass(frozen=True, slots=True)
class Registered(Sequence[str]):
    """The names in a registry of a higher layer, whose module has ``registered()`` and is imported on first use."""

    module: str

    def _names(self) -> tuple[str, ...]:
        return tuple(importlib.import_module(self.module).registered())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._names()[index]

    def __len__(self) -> int:
        return len(self._names())


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One row of the table.

    ``low`` and ``high`` are inclusive, None without a limit. A ``str`` is one of ``choices``. ``default_from`` names
    the variable whose value is the default, if any.
    """

    name: str
    default: bool | int | float | str
    group: str
    when: When
    meaning: str
    effect: str
    low: float | None = None
    high: float | None = None
    choices: Sequence[str] = ()
    aliases: tuple[str, ...] = ()
    power_of_two: bool = False
    form: str = ""
    """Legal values of a ``str`` without ``choices``, as text; the reader checks them."""
    default_from: str | None = None

    @property
    def kind(self) -> type:
        """Type of the default and of every legal value: ``bool``, ``int``, ``float`` or ``str``."""
        return type(self.default)

    @property
    def effective(self) -> bool:
        """Whether the variable has an effect here."""
        return not self.effect.startswith("no effect")

    @property
    def legal(self) -> str:
        """Legal values as text: ``an integer from 1 to 1024``."""
        if self.kind is bool:
            return "true, false, 1 or 0"
        if self.form:
            return self.form
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = "a power of two" if self.power_of_two else {int: "an integer", float: "a number"}[self.kind]
        if self.low is not None and self.high is not None:
            return f"{noun} from {self.low} to {self.high}"
        return noun if self.low is None else f"{noun} >= {self.low}"


_THREADS_MAX = 1024
_MIB_MAX = 2**40
_BIND_NOW = "in force at every bind"
_engine = partial(Variable, group="engine", when=When.PROCESS)
_planner = partial(Variable, group="planner", when=When.BIND)
_executor = partial(Variable, group="executor", when=When.BIND)
_storage = partial(Variable, group="storage", when=When.PROCESS)
_kvstore = partial(Variable, group="kvstore", when=When.CONSTRUCT)


def _threads(name: str, default: int, meaning: str, effect: str) -> Variable:
    return _engine(name=name, default=default, low=1, high=_THREADS_MAX, meaning=meaning, effect=effect)


_ENGINE = (
    _engine(
        name="MXNET_ENGINE_TYPE",
        default="ThreadedEnginePerDevice",
        choices=Registered("weftplan.engine.registry"),
        meaning="Engine type: inline at the push, one pool, pools per device, or one seeded thread.",
        effect="kind of the process-wide engine",
    ),
    _threads(
        "MXNET_CPU_WORKER_NTHREADS",
        1,
        "Worker threads per CPU context.",
        "size of the FIFO pool of each cpu(i); ThreadedEngine has 16 workers regardless",
    ),
    _threads(
        "MXNET_CPU_PRIORITY_NTHREADS",
        4,
        "Threads for prioritized CPU operations.",
        "size of the one CPU priority pool; none with ThreadedEngine",
    ),
    _threads(
        "MXNET_GPU_WORKER_NTHREADS",
        2,
        "Worker threads per GPU, and streams for its computation.",
        "size of each worker pool of gpu(i) and sim(i); ThreadedEngine has 16 workers regardless",
    ),
    _threads(
        "MXNET_GPU_COPY_NTHREADS",
        1,
        "Copy threads per GPU.",
        "size of the copy pool of each gpu(i) and sim(i); one with ThreadedEngine",
    ),
    _threads(
        "MXNET_MP_WORKER_NTHREADS", 1, "Worker threads per CPU context in a forked child.", "pool size after a fork"
    ),
    _threads(
        "WEFTPLAN_BLAS_NTHREADS",
        1,
        "Threads of one BLAS call, whatever the number of workers.",
        "set for the process when its first engine is made, unless OPENBLAS_NUM_THREADS or another variable of BLAS "
        "alone is set and this one is not; OMP_NUM_THREADS does not count",
    ),
    _engine(
        name="WEFTPLAN_KERNEL_CORES",
        default=0,
        low=0,
        high=_THREADS_MAX,
        meaning="Cores that one operation may use while the others are idle; 0: as OMP_NUM_THREADS says, else all.",
        effect="how many threads compute parts of a large operation, with the same bits",
    ),
    _engine(
        name="WEFTPLAN_ERRORS",
        default="weftplan",
        choices=("weftplan", "mxnet"),
        meaning="Whether a failed array stays failed until it is written (weftplan) or raises once (mxnet).",
        effect="the engine's rule for stored errors",
    ),
    _engine(
        name="WEFTPLAN_ENGINE_DEBUG",
        default=False,
        meaning="Hand read arrays to operations as read-only views and check declarations.",
        effect="the engine's debug mode; the planner checks a graph after each of its passes",
    ),
    _engine(
        name="WEFTPLAN_ENGINE_WATCHDOG_S",
        default=30.0,
        low=0,
        meaning="Seconds without progress after which waiting operations are named on stderr; 0 is off.",
        effect="the engine's watchdog: in debug mode, and wherever this is set",
    ),
    _engine(
        name="WEFTPLAN_ENGINE_WAITERS_HELP",
        default="1",
        choices=("0", "1", "all"),
        meaning="Let a waiting thread run operations while all workers of their queue are asleep: none (0), those that "
        "weftplan pushes for itself (1), or user functions, too (all).",
        effect="latency of waits on threaded engines",
    ),
    _engine(
        name="WEFTPLAN_ENGINE_MAX_PENDING",
        default=0,
        low=0,
        meaning="Number of pending operations at which a push waits, until half of them are done; 0 is no limit.",
        effect="memory of pending operations; pushes inside operations never wait",
    ),
    _engine(
        name="WEFTPLAN_TASK_WORKERS",
        default=0,
        low=0,
        high=_THREADS_MAX,
        meaning="Worker threads per CPU context for tasks (engine.submit, engine.task); 0 is one for each core that "
        "the process may use.",
        effect="size of the pool of each cpu(i) that runs tasks",
    ),
)

_SHARED_WEIGHT = (
    "the gradients of a FullyConnected weight that 8 layers or more share are not batched (MXNET_USE_FUSION): their "
    "sum is rounded in another order"
)
_PLANNER = (
    _planner(
        name="WEFTPLAN_PLANNER_STRATEGY",
        default="auto",
        choices=Registered("weftplan.planner.strategies"),
        meaning="How buffers share memory: match range, offsets in a slab (arena), or the smaller of the two.",
        effect=_BIND_NOW,
    ),
    _planner(
        name="MXNET_EXEC_ENABLE_INPLACE",
        default=True,
        aliases=("FLAGS_enable_inplace", "enable_inplace"),
        meaning="Let an output take the storage of an input that dies there (Paddle: enable_inplace).",
        effect=_BIND_NOW,
    ),
    _planner(
        name="MXNET_EXEC_MATCH_RANGE",
        default=10,
        low=0,
        aliases=("NNVM_EXEC_MATCH_RANGE",),
        meaning="How many times larger or smaller a free block may be to be reused; 0 switches sharing off.",
        effect="in force at every bind: the range for the strategy match_range, 0 for every strategy",
    ),
    _planner(
        name="NNVM_AUTO_SEARCH_MATCH_RANGE",
        default=False,
        meaning="Try match ranges 1, 2, 4, … and keep the one whose plan is smallest.",
        effect="in force at every bind, for the strategy match_range",
    ),
    _planner(
        name="MXNET_EXEC_NUM_TEMP",
        default=1,
        low=1,
        aliases=("NNVM_EXEC_NUM_TEMP",),
        default_from="MXNET_GPU_TEMP_COPY",
        meaning="Temporary workspaces per device: fewer need less memory and allow less parallelism.",
        effect="in force at every bind: above 1, operations wait less for memory of other branches, and memory "
        "may grow to the total of that number of groups of branches",
    ),
    _planner(
        name="MXNET_GPU_TEMP_COPY",
        default=1,
        low=1,
        meaning="Temporary workspaces per GPU, as the older name of MXNET_EXEC_NUM_TEMP.",
        effect="default of MXNET_EXEC_NUM_TEMP",
    ),
    _planner(
        name="MXNET_EXEC_INPLACE_GRAD_SUM_CAP",
        default=8,
        low=0,
        meaning="Gradient sums of this many terms or more are accumulated in place, one term at a time.",
        effect=f"{_BIND_NOW}; above 8, {_SHARED_WEIGHT}",
    ),
    _planner(
        name="FLAGS_max_inplace_grad_add",
        default=0,
        low=0,
        meaning="Gradient sums of fewer terms than this are accumulated in place, one term at a time.",
        effect=_BIND_NOW,
    ),
    _planner(
        name="MXNET_ELIMINATE_COMMON_EXPR",
        default=True,
        meaning="Compute equal sub-expressions once.",
        effect=f"{_BIND_NOW}; the gradients of merged nodes are added before they are propagated, not after, so their "
        "sum is rounded in another order",
    ),
    _planner(
        name="MXNET_USE_FUSION",
        default=True,
        meaning="Fuse nodes: consecutive nodes, and gradients of a shared weight.",
        effect="read at each bind. On a host: a relu in the Convolution or BatchNorm before it, and its gradient in "
        "that of the BatchNorm; a BatchNorm without gradient in the Convolution before it; in training, a depthwise "
        "Convolution of 3x3 with the BatchNorms around it, if kernels are compiled. On a GPU: trees of elementwise "
        "nodes with bias, relu and the last step of a BatchNorm. All have the same bits. Gradients of a FullyConnected "
        "weight that 8 layers or more share, several layers at a time: their sum is rounded in another order. Plans "
        "list the fused nodes; a monitor sees their outputs",
    ),
    _planner(
        name="WEFTPLAN_DROP_DEAD_OUTPUTS",
        default=True,
        meaning="Drop node outputs without a reader: they have no memory and are not computed.",
        effect=f"{_BIND_NOW}; if 0, {_SHARED_WEIGHT}",
    ),
    _planner(
        name="MXNET_BACKWARD_DO_MIRROR",
        default=False,
        meaning="Recompute cheap forward results in the backward pass instead of keeping them.",
        effect="repeats all but Convolution, FullyConnected, Concat, Dropout and losses; used only where the planned "
        f"peak falls; if the plan without fusion is better, {_SHARED_WEIGHT}",
    ),
    _planner(
        name="MXNET_MEMORY_OPT",
        default=False,
        meaning="Recompute by the echo rule: only where the planned memory shrinks.",
        effect="repeats what lies between such operators unless storing it is no dearer; used only where the planned "
        f"peak falls; if the plan without fusion is better, {_SHARED_WEIGHT}; wins over MXNET_BACKWARD_DO_MIRROR",
    ),
)

_EXECUTOR = (
    _executor(
        name="WEFTPLAN_EXECUTOR_STRATEGY",
        default="static",
        choices=("static", "dynamic"),
        meaning="Whether an executor holds the memory of its plan, or allocates and frees each result as it runs.",
        effect=_BIND_NOW,
    ),
    _executor(
        name="MXNET_EXEC_BULK_EXEC_INFERENCE",
        default=True,
        meaning="Push an inference graph as one operation.",
        effect=_BIND_NOW,
    ),
    _executor(
        name="MXNET_EXEC_BULK_EXEC_TRAIN",
        default=True,
        meaning="Push a training graph in segments of several operations.",
        effect=_BIND_NOW,
    ),
    _executor(
        name="MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN",
        default=15,
        low=1,
        meaning="Most operations in a training segment.",
        effect=_BIND_NOW,
    ),
    *(
        _executor(
            name=f"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_{suffix}",
            default=15,
            default_from="MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN",
            low=1,
            meaning=f"Most operations in a segment of the {direction} pass.",
            effect=_BIND_NOW,
        )
        for suffix, direction in (("FWD", "forward"), ("BWD", "backward"))
    ),
    _executor(
        name="WEFTPLAN_KERNELS",
        default="auto",
        choices=("auto", "numpy", "native"),
        meaning="Compiled kernels: auto uses them if they are expected to be faster, native whenever possible, numpy "
        "never. Without llvmlite all three mean numpy.",
        effect=_BIND_NOW,
    ),
    _executor(
        name="WEFTPLAN_KERNEL_CACHE",
        default=True,
        meaning="Keep compiled kernels in the user's private cache folder.",
        effect="in force for kernels that a later bind is the first to need",
    ),
    _executor(
        name="WEFTPLAN_PLAN_CACHE",
        default=True,
        meaning="Keep plans in the user's private cache folder, so that a later process need not plan the same network "
        "again.",
        effect=_BIND_NOW,
    ),
    _executor(
        name="MXNET_CUDNN_AUTOTUNE_DEFAULT",
        default=0,
        low=0,
        high=2,
        meaning="Choice of algorithm: 0 heuristic, 1 the fastest within the workspace limit, 2 the fastest.",
        effect="on a host with WEFTPLAN_KERNELS=auto each kind of call is measured once and the result cached in the "
        "user's cache folder; on a GPU with cuDNN a measured choice may vary from run to run, and so may the last bits "
        "of results",
    ),
    _executor(
        name="MXNET_ENABLE_CUDA_GRAPHS",
        default=False,
        when=When.CONSTRUCT,
        meaning="Capture segments as CUDA graphs.",
        effect="segments on gpu(i) are captured at their second run, then replayed with one launch; "
        "Executor.cuda_graphs() lists them, and the reason for the others",
    ),
)


def _mxnet_pool(device: str, context: str) -> tuple[Variable, ...]:
    """Return the five pool variables of one device type: ``device`` in their names, ``context`` in Python."""
    applies = f"pool of each {context}" + (" and sim(i)" if device == "GPU" else "")
    return (
        _storage(
            name=f"MXNET_{device}_MEM_POOL_TYPE",
            default="Naive",
            choices=("Naive", "Round", "Unpooled"),
            meaning=f"Pool of {context}: exact sizes in pages, power-of-two sizes, or none.",
            effect=applies,
        ),
        _storage(
            name=f"MXNET_{device}_MEM_POOL_RESERVE",
            default=5,
            low=0,
            high=100,
            meaning=f"Percent of the memory of {context} that cached blocks leave to others.",
            effect=f"{applies}: cached blocks go back before new memory would touch it; live arrays may use it",
        ),
        _storage(
            name=f"MXNET_{device}_MEM_POOL_PAGE_SIZE",
            default=4096,
            low=32,
            high=2**30,
            power_of_two=True,
            aliases=(f"MXNET_{device}_POOL_PAGE_SIZE",),
            meaning=f"Bytes to a multiple of which requests on {context} are rounded.",
            effect=applies,
        ),
        _storage(
            name=f"MXNET_{device}_MEM_LARGE_ALLOC_ROUND_SIZE",
            default=2 * 2**20,
            low=1,
            meaning=f"Bytes to a multiple of which requests on {context} above that size are rounded (Naive pool).",
            effect=applies,
        ),
        _storage(
            name=f"MXNET_{device}_MEM_POOL_ROUND_LINEAR_CUTOFF",
            default=24,
            low=20,
            high=34,
            meaning=f"Log2 of the size on {context} up to which sizes are powers of two (Round pool).",
            effect=applies,
        ),
    )


def _flag(
    name: str,
    default: bool | int | float | str,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    effect: str,
    group: str = "storage",
    default_from: str | None = None,
) -> Variable:
    """Return one of Paddle's flags, typed by its default."""
    return Variable(
        name=f"FLAGS_{name}",
        default=default,
        low=low,
        high=high,
        choices=choices,
        when=When.PROCESS if group == "storage" else When.BIND,
        group=group,
        meaning=meaning,
        effect=effect,
        default_from=default_from,
    )


_STORAGE = (
    *_mxnet_pool("GPU", "gpu(i)"),
    *_mxnet_pool("CPU", "cpu(i)"),
    *_mxnet_pool("CPU_PINNED", "cpu_pinned(i)"),
    _flag(
        "allocator_strategy",
        "mxnet",
        "Paddle: reserve large blocks first, or grow on demand. Unset: MXNet's pools.",
        choices=("mxnet", "naive_best_fit", "auto_growth"),
        effect="pool of every device whose MXNET_*_MEM_POOL_TYPE is unset",
    ),
    _flag(
        "fraction_of_gpu_memory_to_use",
        0.92,
        "Share of the free GPU memory per block; 0 takes no blocks.",
        low=0,
        high=1,
        effect="chunks of gpu(i) and sim(i), with naive_best_fit, which it chooses unless another variable does",
    ),
    _flag(
        "fraction_of_cpu_memory_to_use",
        1.0,
        "Largest share of the host memory per block; 0 takes no blocks.",
        low=0,
        high=1,
        effect="chunks of cpu(i), with naive_best_fit, which it chooses unless another variable does",
    ),
    _flag(
        "fraction_of_cuda_pinned_memory_to_use",
        0.5,
        "Share of the host memory for pinned blocks.",
        low=0,
        high=1,
        effect="chunks of cpu_pinned(i), with naive_best_fit, which it chooses unless another variable does",
    ),
    _flag(
        "initial_cpu_memory_in_mb",
        500,
        "MiB of each host block, if the share is not less.",
        low=0,
        high=_MIB_MAX,
        effect="chunks of cpu(i), with naive_best_fit",
    ),
    _flag(
        "initial_gpu_memory_in_mb",
        0,
        "MiB of the first GPU block; 0 uses the fraction.",
        low=0,
        high=_MIB_MAX,
        effect="first chunk of gpu(i) and sim(i), with naive_best_fit",
    ),
    _flag(
        "reallocate_gpu_memory_in_mb",
        0,
        "MiB of each later GPU block; 0 uses the fraction.",
        low=0,
        high=_MIB_MAX,
        effect="later chunks of gpu(i) and sim(i), with naive_best_fit",
    ),
    _flag(
        "gpu_memory_limit_mb",
        0,
        "Most MiB used per GPU; 0 is no limit.",
        low=0,
        high=_MIB_MAX,
        effect="most that the pool of each gpu(i) and sim(i) holds, cached blocks included",
    ),
    _flag(
        "auto_growth_chunk_size_in_mb",
        0,
        "Least MiB by which a pool grows; 0 grows by the request.",
        low=0,
        high=_MIB_MAX,
        effect="chunks of every device, with auto_growth",
    ),
    _flag(
        "free_when_no_cache_hit",
        False,
        "Return unused chunks to the device before a pool grows.",
        effect="pools of every device, with auto_growth",
    ),
    _flag(
        "gpu_allocator_retry_time",
        10_000,
        "Milliseconds that an allocation of GPU memory waits for frees before it fails.",
        low=0,
        effect="gpu(i) and sim(i): how long an allocation without room waits for operations that still use dead arrays",
    ),
    _flag(
        "init_allocated_mem",
        False,
        "Fill fresh memory with a non-zero pattern, to find reads before writes.",
        effect="memory of every device is filled with bytes 0xEF as it comes and goes",
    ),
    _storage(
        name="WEFTPLAN_SPILL",
        default="true",
        form="true, false, or offload targets such as host:8GB,file:/tmp:50GB,peer",
        aliases=("WEFTPLAN_PLANNER_SPILL",),
        meaning="Offload targets when device memory runs out: host, file:FOLDER, peer, each with :SIZE; true: host.",
        effect="results of a plan with a budget are offloaded there, those of gpu(i) and sim(i) with true (read at "
        "every bind); if targets are listed, arrays of every device are spilled to them when memory runs out",
    ),
    _storage(
        name="WEFTPLAN_MEASURE_LINKS",
        default=True,
        meaning="Measure the copy speed from each GPU to its offload targets once, at the first bind with a budget.",
        effect="the speeds of gpu(i) decide which results are offloaded under a budget (read at every bind); off: "
        "constants are assumed, so plans depend on no measurement",
    ),
    _storage(
        name="WEFTPLAN_STORAGE_COMPACT",
        default=False,
        meaning="Let arrays move within pools that cut chunks, so that free bytes become contiguous.",
        effect="arrays of every device with auto_growth and naive_best_fit: moved when memory runs out, and by "
        "mx.storage.compact()",
    ),
    _storage(
        name="WEFTPLAN_STORAGE_GUARD",
        default=False,
        meaning="Put margins around all memory, and check whether an operation has written to them.",
        effect="memory of every device: checked when it is freed, and in mx.storage.check_guards()",
    ),
    _storage(
        name="WEFTPLAN_STORAGE_COMPAT",
        default="documents",
        choices=("documents", "paddle"),
        meaning="Whether Paddle's strategies follow its documents or its source, where the two differ.",
        effect="sizes of chunks and headers, with naive_best_fit and auto_growth",
    ),
    _flag(
        "eager_delete_tensor_gb",
        0.0,
        "GiB of dead results that are freed together; below 0 none within a run.",
        effect="in force at every bind with WEFTPLAN_EXECUTOR_STRATEGY=dynamic; for arrays, from the first that dies: "
        "below 0 they are freed when memory runs out",
        group="executor",
    ),
    _flag(
        "memory_fraction_of_eager_deletion",
        1.0,
        "Share of the bytes of a graph's temporaries that is collected, largest first.",
        low=0,
        high=1,
        effect="in force at every bind with WEFTPLAN_EXECUTOR_STRATEGY=dynamic",
        group="executor",
    ),
    _flag(
        "fast_eager_deletion_mode",
        True,
        "Free GPU memory before the kernels that use it end.",
        effect="in force at every bind with WEFTPLAN_EXECUTOR_STRATEGY=dynamic, on gpu(i) and sim(i): memory is freed "
        "when the kernels that use it are enqueued, for kernels enqueued after them; 0: when they have finished",
        group="executor",
    ),
    _flag(
        "eager_delete_scope",
        True,
        "Free uncollected temporaries at the end of each run; otherwise they stay for the next.",
        effect="in force at every bind with WEFTPLAN_EXECUTOR_STRATEGY=dynamic",
        group="executor",
    ),
    _flag(
        "cudnn_exhaustive_search",
        False,
        "Measure every convolution algorithm and keep the fastest.",
        effect="as MXNET_CUDNN_AUTOTUNE_DEFAULT=1, where that is 0",
        group="executor",
    ),
    _flag(
        "conv_workspace_size_limit",
        -1,
        "MiB of scratch that the algorithm of a convolution may take; -1: as the operator's workspace says.",
        low=-1,
        effect="convolutions on gpu(i), from the next plan on: the smaller of this and the operator's workspace",
        group="executor",
    ),
    _flag(
        "check_nan_inf",
        False,
        "Check all results of all nodes, and fail at the first one that is not a finite number.",
        effect="executors that are bound later: forward and backward run node by node, wait for each, and raise an "
        "error that names the node",
        group="executor",
    ),
    _flag(
        "enable_cublas_tensor_op_math",
        False,
        "Allow tensor cores in matrix products, at some loss of precision.",
        effect="float32 as TF32: products of a GPU from its first use on, convolutions by cuDNN from the next plan on",
        group="executor",
        default_from="MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION",
    ),
    _executor(
        name="MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION",
        default=False,
        meaning="Let float32 products use tensor cores.",
        effect="default of FLAGS_enable_cublas_tensor_op_math",
    ),
    _executor(
        name="MXNET_CUDA_ALLOW_TENSOR_CORE",
        default=True,
        meaning="Let operators use tensor cores.",
        effect="0: float32 is never computed as TF32, whatever FLAGS_enable_cublas_tensor_op_math says; which cores "
        "compute float16, the libraries of CUDA decide",
    ),
)

_KVSTORE = (
    _kvstore(
        name="MXNET_KVSTORE_REDUCTION_NTHREADS",
        default=4,
        low=1,
        high=_THREADS_MAX,
        meaning="Threads that sum one large array.",
        effect="threads of a reduction of the local store",
    ),
    _kvstore(
        name="MXNET_KVSTORE_BIGARRAY_BOUND",
        default=1_000_000,
        low=1,
        meaning="Elements from which an array counts as large.",
        effect="smallest array that is summed by several threads",
    ),
    _kvstore(
        name="MXNET_UPDATE_ON_KVSTORE",
        default=True,
        meaning="Run the optimizer in the store, not in each worker.",
        effect="default of Module.init_optimizer",
    ),
    _kvstore(
        name="MXNET_ENABLE_GPU_P2P",
        default=True,
        meaning="Copy between GPUs directly where the hardware can.",
        effect="each pair of gpu(i) is queried, enabled and checked with known bytes before its first copy; without "
        "peer access, or if this is off, copies pass through page-locked host memory; doctor and traces show the route",
    ),
    _kvstore(
        name="MXNET_KVSTORE_USETREE",
        default=False,
        meaning="Reduce and broadcast over trees that follow the links between GPUs.",
        effect="the store device uses trees; otherwise it uses the fastest algorithm for the links, trees included",
    ),
    _kvstore(
        name="MXNET_KVSTORE_LOGTREE",
        default=False,
        meaning="Log the trees.",
        effect="a warning in the log for each range of a tree that the store device uses",
    ),
    _kvstore(
        name="MXNET_KVSTORE_TREE_ARRAY_BOUND",
        default=10_000_000,
        low=1,
        meaning="Elements above which an array is cut into one slice per tree.",
        effect="ranges of an array on trees of the store device, with MXNET_KVSTORE_USETREE",
    ),
    _kvstore(
        name="MXNET_KVSTORE_TREE_BACKTRACK",
        default=False,
        meaning="Search for the trees exhaustively.",
        effect="trees of most weight for up to 8 devices; otherwise a heuristic of Kernighan and Lin finds them",
    ),
    _kvstore(
        name="MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY",
        default=0.7,
        low=0,
        high=1,
        meaning="Factor by which the weight of a link falls with each tree that uses it.",
        effect="how much the trees of several roots share links",
    ),
    _kvstore(
        name="WEFTPLAN_KVSTORE_STALL",
        default=60.0,
        low=0,
        meaning="Seconds after which a process that waits for others logs the ranks and the reason.",
        effect="one warning for each exchange of a distributed store that is late",
    ),
    _kvstore(
        name="WEFTPLAN_KVSTORE_SHARED_MEMORY",
        default=True,
        meaning="Let processes of one host exchange gradients in shared memory; otherwise MPI carries all.",
        effect="transport of messages and sums of dist_sync if all processes run on one host",
    ),
    _kvstore(
        name="WEFTPLAN_KVSTORE_TIMEOUT",
        default=600.0,
        low=0,
        meaning="Seconds after which a process that waits for others gives up.",
        effect="WorkerLostError in exchanges of a distributed store",
    ),
    _flag(
        "fuse_parameter_groups_size",
        -1,
        "Gradients exchanged in one bucket; -1 is no limit.",
        low=-1,
        effect="number of gradients that local, device, nccl and dist_sync sum, update and copy as one bucket",
        group="kvstore",
    ),
    _flag(
        "fuse_parameter_memory_size",
        8.0,
        "MiB of gradients exchanged in one bucket; below 0 is no limit.",
        effect="bytes that local, device, nccl and dist_sync sum, update and copy as one bucket",
        group="kvstore",
    ),
)

_TRAINING = (
    Variable(
        name="WEFTPLAN_PROGRESS",
        default=True,
        group="training",
        when=When.CONSTRUCT,
        meaning="Show the progress of long loops (fit, score, predict, plan searches, conversions, data scans): a live "
        "line on a terminal or in a notebook, a line every ten seconds in a pipe.",
        effect="in force for loops that begin later; progress=True or False of a call wins",
    ),
)

_PROFILER = (
    Variable(
        name="MXNET_PROFILER_AUTOSTART",
        default=False,
        group="profiler",
        when=When.PROCESS,
        meaning="Record operations from the import of the package on.",
        effect="the trace is written to profile.json, or the file that mx.profiler.set_config names, when the process "
        "ends; mx.profiler.dump writes it earlier",
    ),
    Variable(
        name="MXNET_PROFILER_MODE",
        default=15,
        low=0,
        high=15,
        group="profiler",
        when=When.PROCESS,
        meaning="Contents of a recording, as MXNet's sum of 1 (operations of symbols), 2 (operations of arrays), "
        "4 (calls) and 8 (memory).",
        effect="without 8, live bytes are not sampled unless mx.profiler.set_config(profile_memory=True) asks for "
        "them; every operation is recorded in any mode",
    ),
)

TABLE: tuple[Variable, ...] = (*_ENGINE, *_PLANNER, *_EXECUTOR, *_STORAGE, *_KVSTORE, *_TRAINING, *_PROFILER)
"""Every variable, grouped by the layer that reads it."""

_WORDS = {
    "accuracy is that of NumPy: sums of float16 are made in float32": "MXNET_SAFE_ACCUMULATION",
    "MXNET_BACKWARD_DO_MIRROR and a budget decide what is repeated": "MXNET_BACKWARD_MIRROR_STEP",
    "random numbers have a key for each draw and share no generators": """
        MXNET_CPU_PARALLEL_RAND_COPY MXNET_GPU_PARALLEL_RAND_COPY MXNET_GPU_CUDNN_DROPOUT_STATE_COPY""",
    "WEFTPLAN_KERNEL_CORES says how many cores one operation may use": """
        MXNET_CPU_PARALLEL_SIZE MXNET_OMP_MAX_THREADS MXNET_USE_NUM_CORES_OPERATOR_TUNING FLAGS_paddle_num_threads
        FLAGS_inner_op_parallelism""",
    "scratch is planned with the graph": "MXNET_CPU_TEMP_COPY",
    "weftplan plan --kernels shows kernels and passes": """
        MXNET_FUSION_VERBOSE MXNET_EXEC_VERBOSE_LOGGING MXNET_MEM_PLAN_VERBOSE_LOGGING
        MXNET_INFER_STORAGE_TYPE_VERBOSE_LOGGING MXNET_SUBGRAPH_VERBOSE MXNET_STORAGE_FALLBACK_LOG_VERBOSE
        FLAGS_print_sub_graph_dir FLAGS_enable_unused_var_check""",
    "a trace shows which graphs were captured": """
        MXNET_CUDA_GRAPHS_VERBOSE MXNET_ENABLE_CUDA_GRAPHS_VERBOSE MXNET_ENABLE_CUDA_GRAPHS_MAX_LOG_ENTRIES""",
    "mx.profiler records operations": """
        MXNET_ENGINE_INFO FLAGS_pe_profile_fname FLAGS_tracer_profile_fname FLAGS_multiple_of_cupti_buffer_size
        FLAGS_enable_rpc_profiler FLAGS_benchmark FLAGS_call_stack_level FLAGS_enable_host_event_recorder_hook""",
    "MXNET_GPU_WORKER_NTHREADS is also the number of streams": "MXNET_GPU_WORKER_NSTREAMS",
    "nothing is downloaded": "MXNET_HOME MXNET_GLUON_REPO",
    "nothing here is a C library": """
        MXNET_LIBRARY_PATH MXNET_INCLUDE_PATH MXNET_ENABLE_CYTHON MXNET_ENFORCE_CYTHON MXNET_CONF_PATH""",
    "every array is dense": "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE",
    "sums have a fixed order of additions": """
        MXNET_KVSTORE_SERIAL_PUSH FLAGS_sort_sum_gradient FLAGS_cudnn_deterministic FLAGS_cpu_deterministic
        FLAGS_embedding_deterministic""",
    "every process sums its share; there are no servers": """
        MXNET_KVSTORE_SLICE_THRESHOLD FLAGS_rpc_deadline FLAGS_rpc_server_profile_path FLAGS_rpc_send_thread_num
        FLAGS_rpc_get_thread_num FLAGS_rpc_prefetch_thread_num FLAGS_rpc_disable_reuse_port FLAGS_rpc_retry_times
        FLAGS_rpc_retry_bind_port FLAGS_dist_threadpool_size FLAGS_worker_update_interval_secs
        FLAGS_communicator_fake_rpc FLAGS_communicator_independent_recv_thread FLAGS_communicator_max_merge_var_num
        FLAGS_communicator_max_send_grad_num_before_recv FLAGS_communicator_merge_sparse_bucket
        FLAGS_communicator_merge_sparse_grad FLAGS_communicator_min_send_grad_num_before_recv
        FLAGS_communicator_send_queue_size FLAGS_communicator_send_wait_times FLAGS_communicator_thread_pool_size
        FLAGS_communicator_is_sgd_optimizer FLAGS_apply_pass_to_program FLAGS_apply_pass_to_communicator""",
    "images are decoded by Pillow, on preprocess_threads threads": "MXNET_MP_OPENCV_NUM_THREADS",
    "updates of many weights are fused into one operation": """
        MXNET_OPTIMIZER_AGGREGATION_SIZE MXNET_UPDATE_AGGREGATION_SIZE FLAGS_fuse_all_optimizer_ops""",
    "graphs are not given to other runtimes": """
        MXNET_SUBGRAPH_BACKEND FLAGS_use_mkldnn FLAGS_tracer_mkldnn_ops_on FLAGS_tracer_mkldnn_ops_off FLAGS_use_ngraph
        FLAGS_use_cinn FLAGS_use_xpu MXNET_MKLDNN_CACHE_NUM MXNET_MKLDNN_DEBUG MXNET_MKLDNN_ENABLED
        MXNET_USE_MKLDNN_RNN MXNET_MKLDNN_FORCE_FC_AB_FORMAT MXNET_MKLDNN_QFC_DYNAMIC_PARAMS
        MXNET_DISABLE_MKLDNN_CONV_OPT MXNET_DISABLE_MKLDNN_FC_OPT MXNET_DISABLE_MKLDNN_FUSE_CONV_BN
        MXNET_DISABLE_MKLDNN_FUSE_CONV_RELU MXNET_DISABLE_MKLDNN_FUSE_CONV_SUM MXNET_DISABLE_MKLDNN_FUSE_FC_ELTWISE
        MXNET_DISABLE_MKLDNN_TRANSFORMER_OPT MXNET_DISABLE_MKLDNN_QEM_FLOAT_OUTPUT MXNET_DISABLE_MKLDNN_QEM_FUSE_ALL
        MXNET_DISABLE_MKLDNN_QFC_FLOAT_OUTPUT MXNET_DISABLE_MKLDNN_QFC_FUSE_ALL
        MXNET_DISABLE_MKLDNN_QTRANSFORMER_FLOAT_OUTPUT MXNET_DISABLE_MKLDNN_QTRANSFORMER_FUSE_ALL""",
    "networks are not run in int8": "MXNET_QUANTIZATION_VERBOSE MXNET_RNN_USE_WEIGHT_CACHE",
    "MXNET_*_MEM_POOL_TYPE and FLAGS_allocator_strategy choose the pools": """
        MXNET_USE_NAIVE_STORAGE_MANAGER FLAGS_use_pinned_memory FLAGS_use_system_allocator
        FLAGS_use_cuda_managed_memory FLAGS_use_stream_safe_cuda_allocator FLAGS_use_shm_cache
        FLAGS_use_virtual_memory_auto_growth FLAGS_gpu_memory_growth FLAGS_fraction_of_npu_memory_to_use""",
    "kernels are chosen by MXNET_CUDNN_AUTOTUNE_DEFAULT": """
        MXNET_USE_OPERATOR_TUNING MXNET_OUTPUT_TUNING_DATA MXNET_VERBOSE_TUNING_INFO MXNET_TUNING_WEIGHT_SCALE
        FLAGS_cudnn_batchnorm_spatial_persistent FLAGS_cudnn_exhaustive_search_times FLAGS_use_autotune""",
    "errors carry the user's line": "MXNET_USE_SIGNAL_HANDLER",
    "mx.gpu(i) and CUDA_VISIBLE_DEVICES choose GPUs": "FLAGS_selected_gpus",
    "the store nccl and peer access decide how GPUs exchange": """
        FLAGS_sync_nccl_allreduce FLAGS_enable_parallel_graph FLAGS_nccl_blocking_wait
        FLAGS_allreduce_record_one_event""",
}
"""Why names of MXNet 1.9.1 and 2.0 and of Paddle do nothing here -> these names."""
UNUSED_HERE: dict[str, str] = {name: word for word, names in _WORDS.items() for name in names.split()}
"""Names that MXNet or Paddle reads and weftplan does not, each with the reason: they are no misspellings of ours."""
