"""Mixed precision: networks lowered to float16 or bfloat16 with float32 weights, and loss scaling.

:func:`lowered` inserts casts into a network. Matrix products run in 16 bits; sensitive operators (losses, softmax,
sums, and every operator not listed as safe) run in float32. Parameters stay float32, so they serve as master weights.
Gradients arrive in float32; optimizers, stores and checkpoints are unaffected.

:class:`LossScale` multiplies the gradients of all losses by a power of two, so that small gradients do not underflow in
float16, and adapts that factor. bfloat16 has the range of float32, so its scale is 1. Only the training thread uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftplan import ndarray as nd
from weftplan.errors import ParameterError
from weftplan.ops.core import registry
from weftplan.ops.core.floats import dtype_of
from weftplan.ops.nn.batch_norm import BATCH_NORMS
from weftplan.symbol import Symbol
from weftplan.symbol.node import Entry, Node, topological_order
from weftplan.training.fit.fit_module import FitModule, TrainedModule, optimizer_of

SCALE = "weftplan_loss_scale"
"""The argument of a lowered network that holds the scale."""
MODES = ("float16", "bfloat16")
_PRODUCTS = frozenset(
    {
        "Convolution",
        "Deconvolution",
        "FullyConnected",
        "RNN",
        "batch_dot",
        "dot",
        "linalg_gemm2",
    }
)
"""Operators that run in 16 bits."""
_HARMLESS = frozenset(
    {
        "Activation",
        *BATCH_NORMS,
        "BlockGrad",
        "Concat",
        "Crop",
        "Dropout",
        "Flatten",
        "LeakyReLU",
        "Pad",
        "Pooling",
        "Reshape",
        "SliceChannel",
        "SwapAxis",
        "UpSampling",
        "_copy",
        "_mul_scalar",
        "_plus_scalar",
        "_minus_scalar",
        "broadcast_add",
        "broadcast_mul",
        "broadcast_sub",
        "clip",
        "elemwise_add",
        "elemwise_mul",
        "elemwise_sub",
        "expand_dims",
        "relu",
        "sigmoid",
        "slice",
        "slice_axis",
        "squeeze",
        "stack",
        "tanh",
        "transpose",
    }
)
"""Operators that run in 16 bits if all their data inputs do."""
_FLOAT32_PARAMETERS = frozenset(BATCH_NORMS)
"""Operators with float32 parameters and 16-bit data."""


def checked(dtype: object) -> str | None:
    """Validate a mixed-precision mode; raises ParameterError unless it is in :data:`MODES` or None."""
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if name not in MODES:
        raise ParameterError(f"fit: mixed_precision must be 'float16', 'bfloat16' or None, got {dtype!r}")
    try:
        dtype_of(name)
    except TypeError as error:
        raise ParameterError(f"fit: mixed_precision={name!r}: {error}") from None
    return name


def lowered(symbol: Symbol, low_dtype: str) -> Symbol:
    """Return the network with casts, and with the loss scale as an additional argument, :data:`SCALE`.

    Names of arguments and outputs are those of ``symbol``, and outputs are float32.
    """
    halves: set[tuple[Node, int]] = set()
    """16-bit entries of the new network."""
    twins: dict[Node, Node] = {}
    casts: dict[tuple[Node, int, str], Entry] = {}
    scale = Node(None, SCALE, attrs={"__shape__": "(1,)", "__dtype__": "0"})

    def cast(entry: Entry, dtype: str) -> Entry:
        half = (entry.node, entry.index) in halves
        if half == (dtype == low_dtype):
            return entry
        key = (entry.node, entry.index, dtype)
        if key not in casts:
            name = f"{entry.node.name}{entry.index or ''}_{dtype}"
            cast_node = _node("amp_cast", name, [entry], {"dtype": dtype})
            casts[key] = Entry(cast_node)
            if dtype == low_dtype:
                halves.add((cast_node, 0))
        return casts[key]

    for node in topological_order(symbol.entries):
        if node.op is None:
            twins[node] = node  # variables are shared between both networks
            continue
        inputs = [Entry(twins[entry.node], entry.index, entry.version) for entry in node.inputs]
        low = False
        if node.op.name in _PRODUCTS:
            inputs = [cast(entry, low_dtype) for entry in inputs]
            low = True
        elif node.op.name in _HARMLESS:
            counted = inputs[:1] if node.op.name in _FLOAT32_PARAMETERS else inputs
            low = bool(counted) and all((entry.node, entry.index) in halves for entry in counted)
            if not low:
                inputs = [cast(entry, "float32") for entry in inputs]
        else:
            inputs = [cast(entry, "float32") for entry in inputs]
            if node.op.loss and inputs:
                scaled = _node("_scale_gradient", f"{node.name}_scaled", [inputs[0], Entry(scale)], {})
                inputs = [Entry(scaled), *inputs[1:]]
        lowered_node = Node(
            node.op,
            node.name,
            attrs=dict(node.attrs),
            params=dict(node.params),
            inputs=inputs,
            control_deps=[twins[dependency] for dependency in node.control_deps],
            created_at=node.created_at,
        )
        twins[node] = lowered_node
        if low:
            halves.update((lowered_node, index) for index in range(lowered_node.num_outputs))
    heads = []
    for entry in symbol.entries:
        twin = Entry(twins[entry.node], entry.index, entry.version)
        heads.append(cast(twin, "float32"))
    return Symbol(heads)


def _node(op: str, name: str, inputs: list[Entry], params: Mapping[str, object]) -> Node:
    op_ = registry.get(op)
    parsed = registry.parse_params(op_, {key: str(value) for key, value in params.items()})
    return Node(op_, name, attrs={key: str(value) for key, value in params.items()}, params=parsed, inputs=inputs)


class LossScale:
    """Dynamic loss scale of mixed-precision training.

    The scale is a power of two, so scaling does not change the bits of gradients that float16 can represent. If a
    gradient is not finite, the update is skipped and the scale is halved, but not below 1. After ``every`` good updates
    it is doubled, up to :attr:`LARGEST`.

    Args:
        scale: initial scale. The default leaves headroom below float16's maximum, 65,504, for gradients that are sums
            over a batch of terms of magnitude 1.
        every: updates without overflow before the scale is doubled; 0: never.
    """

    LARGEST = 2.0**24

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the loss scale of a mode; for bfloat16 it is 1 and never changes."""
        return cls() if dtype == "float16" else cls(1.0, every=0)

    def __init__(self, scale: float = 2.0**10, every: int = 2000) -> None:
        self.scale = scale
        self.every = every
        self.good = 0
        """Updates since the scale last changed."""
        self.skipped = 0
        """Number of skipped updates."""

    def update(self, module: FitModule) -> bool:
        """Update if all gradients are finite, else skip and halve the scale; returns whether it updated. Waits."""
        owner = module.owner()
        if not _finite(owner):
            self.skipped += 1
            self._change(module, max(1.0, self.scale / 2))
            return False
        optimizer = optimizer_of(owner)
        rescale = optimizer.rescale_grad
        optimizer.rescale_grad = rescale / self.scale
        try:
            module.update()
        finally:
            optimizer.rescale_grad = rescale
        self.good += 1
        if self.every and self.good >= self.every and self.scale < self.LARGEST:
            self._change(module, self.scale * 2)
        return True

    def _change(self, module: FitModule, scale: float) -> None:
        self.scale, self.good = scale, 0
        module.set_loss_scale(scale)


def _finite(owner: TrainedModule) -> bool:
    """Return whether the gradients of all contexts are finite."""
    flags = []
    all_finite: Any = nd.multi_all_finite  # its annotations declare a single array
    for k in range(len(owner.contexts)):
        gradients = [grads[k] for grads in owner.group.grad_arrays if grads is not None]
        if gradients:
            flags.append(all_finite(*gradients, num_arrays=len(gradients)))
    return all(bool(flag.asnumpy().all()) for flag in flags)
