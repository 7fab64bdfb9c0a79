"""Options of a plan; every bind reads them from the environment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from weftplan import config
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget
from weftplan.device.offload_targets import parse as parse_targets
from weftplan.errors import MXNetError, PlanError, did_you_mean
from weftplan.support.keyword_errors import known_keywords

STRATEGIES: dict[str, object] = {}
"""All strategies by name; :func:`weftplan.planner.strategies.register` adds them."""
RECOMPUTE = ("off", "mxnet", "echo", "sqrt", "cheap")
LEGAL: dict[str, Collection[str]] = {
    "strategy": STRATEGIES,
    "sizes": ("true", "mxnet"),
    "compat": ("none", "mxnet", "paddle", "paddle_pir"),
    "effort": ("auto", "fast", "normal", "max"),
    "recompute": RECOMPUTE,
    "kernels": config.lookup("WEFTPLAN_KERNELS").variable.choices,
}
LONG_SUM = 8
"""Number of terms from which a gradient sum is long, as in MXNet; see :attr:`PlanOptions.inplace_grad_sum_cap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of the planner; every combination gives a correct plan.

    An option changes the bits of a gradient only if its field says that a sum is rounded in another order.

    Raises:
        PlanError: a value is outside the range that its field documents.
    """

    strategy: str = "auto"
    """``match_range`` (whole blocks, MXNet's rule), ``arena`` (offsets in one slab per device), ``none`` (no sharing
    except in place), ``auto`` (the smallest peak of all of these), or the name of another registered strategy
    (:mod:`weftplan.planner.strategies`)."""
    match_range: int = 10
    """For ``match_range``: a free block serves sizes from 1/match_range to match_range times its own. 0 switches
    sharing off for every strategy."""
    auto_search: bool = False
    """Try match ranges 1, 2, 4, … up to ``match_range`` and keep the smallest plan."""
    enable_inplace: bool = True
    """Let outputs take the memory of dying inputs."""
    num_temp: int = 1
    """Number of colours of branches: more colours make branches more independent and need more memory. Whole blocks are
    reused only by nodes of one colour. ``arena`` minimizes added waits (``MemoryPlan.num_added_waits``) within the
    bytes that the colours would need separately."""
    inplace_grad_sum_cap: int = LONG_SUM
    """Gradient sums of at least this number of terms are accumulated in place, one term at a time (below 2: all sums).
    The terms are added in one order in any case. Only a sum that :attr:`fusion` would batch is rounded in another order
    if it has fewer terms than this."""
    max_inplace_grad_add: int = 0
    """Gradient sums of fewer terms than this are accumulated in place, too."""
    eliminate_common_expr: bool = True
    """Merge nodes that compute the same values. The gradients of merged nodes are added before they are propagated, not
    after, so that their sum is rounded in another order."""
    fusion: bool = True
    """Fuse nodes without changing a bit of the results, so that no array between them is written. On a host: a layer
    and its relu, their gradients, and a convolution and a batch norm without gradient. In training with compiled
    kernels: a depthwise convolution and the batch norms around it. Not with :attr:`compat` or several devices. A
    :attr:`budget` below the peak, and :attr:`recompute`, also plan the graph without fusion and take the better
    plan. The gradients of a FullyConnected weight that 8 layers or more share are batched, too: their sum is then
    rounded in another order."""
    drop_dead_outputs: bool = True
    """Drop outputs without a reader: they have no memory and are not computed. Not with :attr:`compat` mxnet. Without
    it no gradients are batched (:attr:`fusion`), so that their sum is rounded in another order."""
    sizes: str = "true"
    """``true``: elements times bytes of the dtype; ``mxnet``: elements times 4, as MXNet 1.9.1 counts."""
    compat: str = "none"
    """``mxnet`` disables improvements over MXNet 1.9.1's plan: unused outputs get whole blocks, for instance.
    ``paddle`` and ``paddle_pir`` use Paddle's in-place rules; with ``paddle`` the strategy ``match_range`` reuses only
    blocks of exactly the same size (:mod:`weftplan.planner.paddle`)."""
    inplace_blacklist: tuple[str, ...] = ()
    """Operators that compute nothing in place (Paddle: FLAGS_ir_inplace_kernel_blacklist)."""
    workspaces: bool = True
    """Count and place the scratch memory of operators. Without it the plan is only an estimate and cannot be run."""
    reorder: bool = True
    """Let the planner choose the execution order, never to a higher peak than the order given. Not with
    :attr:`compat`."""
    effort: str = "auto"
    """Effort of the arena strategy's packer: ``fast``, ``normal``, ``max`` (see :func:`weftplan.planner.pack`), or
    ``auto``: fast, then normal if the peak is more than 0.5 % above the lower bound."""
    alignment: int = 0
    """Alignment of offsets in a slab, in bytes, at least 8 (the widest element); 0: 64 on a host, 256 on a GPU."""
    recompute: str = "off"
    """Policy that selects the forward results to recompute in the backward part: ``off`` (only nodes with the attribute
    ``__force_mirroring__``), ``mxnet`` (by operator, as MXNET_BACKWARD_DO_MIRROR), ``echo`` (as MXNET_MEMORY_OPT),
    ``sqrt`` (all results between cuts), ``cheap`` (the smallest peak for at most 5 % more modelled time). If the plan
    without :attr:`fusion` is better, a sum that would be batched is rounded in another order."""
    budget: int | None = None
    """Maximum of ``MemoryPlan.peak`` less ``MemoryPlan.offloaded`` (see :attr:`spill`), in bytes. The planner then
    recomputes the results that cost the least time and ignores :attr:`recompute`. A sum that :attr:`fusion` would batch
    may be rounded in another order, as with :attr:`recompute`."""
    kernels: str = "auto"
    """Kernels to use: ``auto`` (compiled kernels if they are expected to be faster), ``native`` (compiled kernels if
    there are any) or ``numpy``. On a GPU, compiled kernels are those in CUDA C. On a CPU without llvmlite only NumPy's
    kernels are available. The scratch of a chosen kernel is counted."""
    autotune: int = 0
    """Choice of kernels if :attr:`kernels` is auto. 0: a heuristic. 2: measure each kind of call once on this machine
    and take the fastest kernel. 1: the same among kernels whose scratch a convolution's ``workspace`` allows.
    Measurements are cached in the user's cache folder, so later choices are the same. ``cudnn_tune`` of a node takes
    precedence."""
    spill: bool | str = True
    """Offload targets under a budget, as a text in the form of ``WEFTPLAN_SPILL``. A result is offloaded if that is
    faster than recomputing it, to the first target with room. True: results of a GPU or a simulated device may go to
    page-locked host memory; False: none are offloaded. Offloaded bytes do not count against the budget."""
    peers: tuple[str, ...] = ()
    """Devices of the same kind, such as ``gpu(1)``, that the offload target ``peer`` may use; the graph must not
    compute on them. ``simple_bind`` lists the devices in use by the process, most free memory first."""
    spill_taken: tuple[int, ...] = ()
    """Bytes already in use at each offload target in :attr:`spill`, which the plan cannot use; 0 for targets beyond the
    end of this tuple. ``bind`` and ``simple_bind`` fill it in."""
    links: tuple[tuple[str, str, float, float], ...] = ()
    """Measured links to offload targets: (device, offload target, bytes per second, seconds before the first byte),
    such as ``("gpu(0)", "cpu_pinned(0)", 2.5e10, 1e-5)``. The planner assumes a speed for other links. Under a budget
    ``bind`` and ``simple_bind`` fill it in."""

    def __post_init__(self) -> None:
        """Validate all fields and normalize sequences to tuples."""
        for name, legal in LEGAL.items():
            self._expect(name, f"one of {', '.join(legal)}", getattr(self, name) in legal)
        names = self.inplace_blacklist
        fine = not isinstance(names, str) and all(isinstance(name, str) for name in names)
        self._expect("inplace_blacklist", "a tuple of names of operators", fine)
        object.__setattr__(self, "inplace_blacklist", tuple(names))  # a list in files
        self._expect("spill", "True, False or a list of offload targets as text", isinstance(self.spill, bool | str))
        self._expect("peers", "a tuple of devices such as 'gpu(1)'", not isinstance(self.peers, str))
        object.__setattr__(self, "peers", tuple(str(peer) for peer in self.peers))
        self._expect("spill_taken", "a tuple of bytes >= 0", all(_is_integer(n, 0) for n in self.spill_taken))
        object.__setattr__(self, "spill_taken", tuple(self.spill_taken))
        try:
            _ = self.targets, self.peer_contexts
        except MXNetError as error:
            raise PlanError(f"plan options spill and peers: {error}") from error
        try:
            links = tuple((str(a), str(b), float(speed), float(latency)) for a, b, speed, latency in self.links)
        except (TypeError, ValueError):
            links = (("", "", 0.0, 0.0),)
        fine = all(speed > 0 and latency >= 0 for *_, speed, latency in links)
        self._expect("links", "a tuple of (device, offload target, bytes a second > 0, seconds >= 0)", fine)
        object.__setattr__(self, "links", links)
        self._expect("autotune", "0, 1 or 2", _is_integer(self.autotune, 0) and self.autotune <= 2)
        for name, least in (
            ("match_range", 0),
            ("num_temp", 1),
            ("inplace_grad_sum_cap", 0),
            ("max_inplace_grad_add", 0),
            ("alignment", 0),
        ):
            self._expect(name, f"an integer >= {least}", _is_integer(getattr(self, name), least))
        self._expect("budget", "a number of bytes >= 0 or None", self.budget is None or _is_integer(self.budget, 0))
        fine = not self.alignment & (self.alignment - 1) and not 0 < self.alignment < 8
        self._expect("alignment", "a power of two from 8 on (or 0)", fine)

    def _expect(self, name: str, expected: str, fine: bool) -> None:
        """Raise PlanError unless ``fine``."""
        if not fine:
            raise PlanError(f"plan option {name} must be {expected}; got {getattr(self, name)!r}")

    @classmethod
    def from_environment(cls, **overrides: object) -> PlanOptions:
        """Return the options that the environment variables specify now, with keyword overrides.

        Raises:
            ConfigError: a variable has an illegal value.
            PlanError: an override is unknown or illegal.
        """
        read = _read(config.in_force())
        return read.replace(**overrides)  # returns ``read`` itself without overrides

    @property
    def targets(self) -> tuple[OffloadTarget, ...]:
        """Offload targets in :attr:`spill`."""
        return parse_targets(str(self.spill))

    @property
    def peer_contexts(self) -> tuple[Context, ...]:
        """:attr:`peers` as contexts."""
        return tuple(map(Context.parse, self.peers))

    def replace(self, **overrides: object) -> PlanOptions:
        """Return a copy with some fields changed, or this object if none changes.

        Raises:
            PlanError: a field does not exist, or a value is illegal.
        """
        fields = self.__dataclass_fields__
        unknown = [name for name in overrides if name not in fields]
        if unknown:
            hint = did_you_mean(unknown[0], fields)
            raise PlanError(f"unknown plan option {unknown[0]!r}; {hint}known: {', '.join(fields)}")
        new: dict[str, Any] = {  # 1 is no truth value
            name: value
            for name, value in overrides.items()
            if type(current := getattr(self, name)) is not type(value) or current != value
        }
        return replace(self, **new) if new else self


PlanOptions.__init__ = known_keywords()(PlanOptions.__init__)  # type: ignore[method-assign]


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _switch(text: str) -> bool | str:
    """Return the value of an environment variable: a bool if it spells one, else the text."""
    lowered = text.strip().lower()
    return text if lowered not in ("", "0", "1", "true", "false") else lowered in ("1", "true")


@lru_cache(maxsize=16)
def _read(variables: tuple[tuple[str, str], ...]) -> PlanOptions:
    """Return the options for these values of the environment variables; cached, because every bind calls it."""
    return PlanOptions(
        strategy=config.get("WEFTPLAN_PLANNER_STRATEGY"),
        match_range=config.get("MXNET_EXEC_MATCH_RANGE"),
        auto_search=config.get("NNVM_AUTO_SEARCH_MATCH_RANGE"),
        enable_inplace=config.get("MXNET_EXEC_ENABLE_INPLACE"),
        num_temp=config.get("MXNET_EXEC_NUM_TEMP"),
        inplace_grad_sum_cap=config.get("MXNET_EXEC_INPLACE_GRAD_SUM_CAP"),
        max_inplace_grad_add=config.get("FLAGS_max_inplace_grad_add"),
        eliminate_common_expr=config.get("MXNET_ELIMINATE_COMMON_EXPR"),
        fusion=config.get("MXNET_USE_FUSION"),
        drop_dead_outputs=config.get("WEFTPLAN_DROP_DEAD_OUTPUTS"),
        spill=_switch(config.get("WEFTPLAN_SPILL")),
        kernels=config.get("WEFTPLAN_KERNELS"),
        autotune=config.get("MXNET_CUDNN_AUTOTUNE_DEFAULT"),
        # Both set: echo, the more careful rule of the two.
        recompute="echo"
        if config.get("MXNET_MEMORY_OPT")
        else ("mxnet" if config.get("MXNET_BACKWARD_DO_MIRROR") else "off"),
    )
