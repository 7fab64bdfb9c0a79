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
        meaning="Temporary workspaces per device: fewer need less memory and allow less parallelism.",
        effect="in force at every bind: above 1, operations wait less for memory of other branches, and memory "
        "may grow to the total of that number of groups of branches",
    ),
    _planner(
        name="MXNET_EXEC_INPLACE_GRAD_SUM_CAP",
        default=8,
        low=0,
        meaning="Gradient sums of this many terms or more are accumulated in place, one term at a time.",
        effect=_BIND_NOW,
    ),
    _planner(
        name="MXNET_ELIMINATE_COMMON_EXPR",
        default=True,
        meaning="Compute equal sub-expressions once.",
        effect=_BIND_NOW,
    ),
    _planner(
        name="MXNET_USE_FUSION",
        default=True,
        meaning="Fuse nodes: consecutive nodes, and gradients of a shared weight.",
        effect="read at each bind, on a host: a relu in the Convolution or BatchNorm before it, and its gradient in "
        "that of the BatchNorm; a BatchNorm without gradient in the Convolution before it; in training, a depthwise "
        "Convolution of 3x3 with the BatchNorms around it, where kernels are compiled; "
        "same bits. Gradients of a FullyConnected weight that 8 layers "
        "or more share, several layers at a time: their sum is rounded in another order. Plans list the fused nodes; a "
        "monitor sees their outputs",
    ),
    _planner(
        name="WEFTPLAN_DROP_DEAD_OUTPUTS",
        default=True,
        meaning="Drop node outputs without a reader: they have no memory and are not computed.",
        effect=_BIND_NOW,
    ),
    _planner(
        name="MXNET_BACKWARD_DO_MIRROR",
        default=False,
        meaning="Recompute cheap forward results in the backward pass instead of keeping them.",
        effect="repeats all but Convolution, FullyConnected, Concat, Dropout and losses; used only where the planned "
        "peak falls",
    ),
    _planner(
        name="MXNET_MEMORY_OPT",
        default=False,
        meaning="Recompute by the echo rule: only where the planned memory shrinks.",
        effect="repeats what lies between such operators unless storing it is no dearer; used only where the planned "
        "peak falls; wins over MXNET_BACKWARD_DO_MIRROR",
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
        effect="chunks of gpu(i) and sim(i), with naive_best_fit",
    ),
    _flag(
        "fraction_of_cpu_memory_to_use",
        1.0,
        "Largest share of the host memory per block; 0 takes no blocks.",
        low=0,
        high=1,
        effect="chunks of cpu(i), with naive_best_fit",
    ),
    _flag(
        "fraction_of_cuda_pinned_memory_to_use",
        0.5,
        "Share of the host memory for pinned blocks.",
        low=0,
        high=1,
        effect="chunks of cpu_pinned(i), with naive_best_fit",
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
        "init_allocated_mem",
        False,
        "Fill fresh memory with a non-zero pattern, to find reads before writes.",
        effect="memory of every device is filled with bytes 0xEF as it comes and goes",
    ),
    _storage(
        name="WEFTPLAN_SPILL",
        default="true",
        form="true, false, or homes such as host:8GB,file:/tmp:50GB,peer",
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
        "enable_cublas_tensor_op_math",
        False,
        "Allow tensor cores in matrix products, at some loss of precision.",
        effect="float32 as TF32: products of a GPU from its first use on, convolutions by cuDNN from the next plan on",
        group="executor",
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

TABLE: tuple[Variable, ...] = (*_ENGINE, *_PLANNER, *_EXECUTOR, *_STORAGE, *_KVSTORE, *_TRAINING)
"""Every variable, grouped by the layer that reads it."""

_ELSEWHERE = """
BACKWARD_MIRROR_STEP CPU_PARALLEL_RAND_COPY CPU_PARALLEL_SIZE CPU_TEMP_COPY CUDA_GRAPHS_VERBOSE
ENABLE_CUDA_GRAPHS_VERBOSE ENABLE_CUDA_GRAPHS_MAX_LOG_ENTRIES ENGINE_INFO EXEC_VERBOSE_LOGGING FUSION_VERBOSE
GPU_CUDNN_DROPOUT_STATE_COPY GPU_PARALLEL_RAND_COPY GPU_TEMP_COPY GPU_WORKER_NSTREAMS HOME
INFER_STORAGE_TYPE_VERBOSE_LOGGING KVSTORE_DIST_ROW_SPARSE_VERBOSE KVSTORE_SERIAL_PUSH KVSTORE_SLICE_THRESHOLD
LIBRARY_PATH MEM_PLAN_VERBOSE_LOGGING MP_OPENCV_NUM_THREADS OMP_MAX_THREADS OPTIMIZER_AGGREGATION_SIZE
PROFILER_AUTOSTART PROFILER_MODE SAFE_ACCUMULATION STORAGE_FALLBACK_LOG_VERBOSE SUBGRAPH_BACKEND SUBGRAPH_VERBOSE
UPDATE_AGGREGATION_SIZE USE_NAIVE_STORAGE_MANAGER USE_OPERATOR_TUNING USE_SIGNAL_HANDLER
"""
UNUSED_HERE = frozenset("MXNET_" + name for name in _ELSEWHERE.split())
"""Names that MXNet 1.9.1 or 2.0 reads and weftplan does not. They are not misspellings of ours."""
