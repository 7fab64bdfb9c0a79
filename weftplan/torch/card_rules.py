"""What differs on a card from a trace on the CPU: one table, each row with its source, which callers can extend.

A forecast traces on the CPU, because fake CUDA tensors need a driver in the backward pass. Rows replace a function of
PyTorch by one that saves what the card's kernels save (:func:`on_card`), or add scratch to an operator
(:func:`scratch_on_card`). Paths are those of PyTorch 2.13.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weftplan.torch.trace import KernelBytes

MIB = 1 << 20
Function = TypeVar("Function", bound=Callable[..., Any])


class CardRule(NamedTuple):
    """A difference and the place where it can be read."""

    what: str
    source: str


ROWS: list[CardRule] = [
    CardRule(
        "cuBLAS: a workspace for the forward and one for the backward thread; 32 MiB from Hopper on, else 8.1 MiB",
        "aten/src/ATen/cuda/CublasHandlePool.cpp, CUBLAS_WORKSPACE_CONFIG; pull requests 83461, 120925",
    ),
    CardRule(
        "cuDNN: a convolution's workspace, from nothing to twice the bytes of its operands, as a range",
        "torch.backends.cudnn.benchmark; aten/src/ATen/native/cudnn/Conv_v8.cpp takes the fastest that fits; "
        "PyTorch's tracker, 49207 and 26950. MNASNet's published runs: none at 600, once the operands at 200, 300",
    ),
    CardRule(
        "optimizers use foreach by default: their temporaries have the size of all parameters",
        "torch/optim/optimizer.py, _default_to_fused_or_foreach; the notes of torch.optim",
    ),
    CardRule("step counts and other host scalars take no memory of the card", "torch/optim/adam.py, _init_group"),
]
"""All rows, for documents and for the list of a forecast's assumptions."""
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions of PyTorch with the functions that replace them."""
SCRATCH: dict[str, Callable[..., int]] = {}
"""Operators with the function of their arguments that returns their scratch in bytes."""


def on_card(*functions: Any, what: str, source: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function in place of ``functions`` of PyTorch in forecasts for a card."""

    def register(replacement: Function) -> Function:
        FUNCTIONS.update(dict.fromkeys(functions, replacement))
        ROWS.append(CardRule(what, source))
        return replacement

    return register


def scratch_on_card(*operators: str, what: str, source: str) -> Callable[[Function], Function]:
    """Return a decorator that registers the scratch of operators such as ``"aten.sort.default"`` on a card."""

    def register(scratch: Function) -> Function:
        SCRATCH.update(dict.fromkeys(operators, scratch))
        ROWS.append(CardRule(what, source))
        return scratch

    return register


@on_card(
    F.dropout,
    torch.dropout,
    what="dropout saves a mask of one byte for each element",
    source="aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable",
)
def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop elements as the fused kernel does."""
    train = training if isinstance(training, bool) else True
    if not train or not 0 < p < 1 or inplace:
        return torch.dropout_(input, p, train) if inplace else torch.dropout(input, p, train)
    return torch.native_dropout(input, p, True)[0]


@on_card(
    F.scaled_dot_product_attention,
    what="attention runs in a fused kernel if dtype, head size and mask allow it: no matrix of scores",
    source="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; the page of scaled_dot_product_attention",
)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention as a fused kernel does, or by matrices if no fused kernel takes the arguments."""
    plain = torch.nn.functional.scaled_dot_product_attention
    if torch.is_autocast_enabled("cpu"):
        lower = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(lower) if t.dtype is torch.float32 else t for t in (query, key, value))
    fused = (torch.float32, torch.float16, torch.bfloat16)
    fits = query.dim() in (3, 4) and query.dtype in fused and query.shape[-1] <= 256 and value.shape[-1] <= 256
    if not fits or (attn_mask is not None and attn_mask.requires_grad):
        return plain(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0.0)
    flat = query.dim() == 3
    if flat:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    result = plain(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return result.squeeze(1) if flat else result


@scratch_on_card(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    what="the backward pass of fused attention sums the query's gradient in float32 if its dtype is smaller",
    source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d",
)
def attention_scratch(grad_out: torch.Tensor, query: torch.Tensor, *more: Any, **options: Any) -> int:
    """Return the bytes of the sums, whose rows are rounded up to 128 and columns to 32."""
    batch, heads, length, width = query.shape
    rows = batch * heads * -(-length // 128) * 128
    sums = rows * -(-width // 32) * 32 * 4 if query.dtype.itemsize < 4 else 0
    return int(sums + rows * 4)


@scratch_on_card(
    "aten.embedding_dense_backward.default",
    what="the backward pass of an embedding of more than 3,072 indices sorts them: four times their bytes",
    source="aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda",
)
def embedding_scratch(grad: torch.Tensor, indices: torch.Tensor, *more: Any, **options: Any) -> int:
    """Return the bytes of the sorted indices, their order, counts and the sort's own buffer."""
    return 4 * indices.numel() * 8 if indices.numel() > 3072 else 0


_NAMES = """
__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss
cdist cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss
kl_div l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss
multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal
rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum renorm tan triplet_margin_loss
"""
FLOAT32 = frozenset(_NAMES.split())
"""Functions that ``autocast("cuda")`` runs in float32."""
ROWS.append(
    CardRule(f"autocast('cuda') runs {len(FLOAT32)} functions in float32", "the page of torch.amp, CUDA op reference")
)
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv")
"""Names of operators that call cuBLAS."""
UNCOUNTED = (
    "sort",
    "topk",
    "unique",
    "nonzero",
    "index_put",
    "cumsum",
    "multinomial",
    "_fft",
    "linalg",
    "lstm",
    "gru",
    "rnn",
)
"""Parts of names of operators that take scratch on a card which no row gives."""


@dataclass
class CardKernels:
    """The bytes of kernels on a card, by the rows."""

    unseen: dict[str, int] = field(default_factory=dict)

    def kernel(self, target: Any, args: Any, kwargs: Any) -> KernelBytes:
        """Return the scratch of a call."""
        name = str(target)
        if name in SCRATCH:
            return KernelBytes(int(SCRATCH[name](*args, **kwargs)))
        if any(f".{word}" in name for word in UNCOUNTED):
            self.unseen[name] = self.unseen.get(name, 0) + 1
        return KernelBytes()


class CardFunctions(TorchFunctionMode):  # type: ignore[misc]
    """A mode with the functions of the table, autocast and devices of a card."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        """Recurrent functions, whose kernels differ."""
        self.autocast = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            self.seen.add(name)
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: _on_host(value) for key, value in (kwargs or {}).items()}
        args = tuple(map(_on_host, args)) if name in ("to", "new_empty", "new_zeros", "new_full") else args
        if name in FLOAT32 and self.autocast and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_float32, args))
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **kwargs)
        if isinstance(func, _PYTHON) and func.__module__ == "torch.nn.functional":
            func = _with_rules(func)
        return func(*args, **kwargs)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Enter the mode, and run ``autocast("cuda")`` of this thread as autocast of the trace's device."""
        original, thread = torch.autocast.__init__, threading.get_ident()

        def start(
            own: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            if threading.get_ident() == thread and device_type == "cuda" and not torch.cuda.is_available():
                self.autocast = True
                device_type, dtype = "cpu", dtype or torch.float16
            original(own, device_type, dtype, enabled, cache_enabled)

        with mock.patch.object(torch.autocast, "__init__", start), self:
            yield


_PYTHON = types.FunctionType
_REBOUND: dict[Any, Any] = {}


def _with_rules(func: Any) -> Any:
    """Return a copy of a Python function of PyTorch that calls the functions of the table.

    A mode does not see the calls inside a function that it has seen.
    """
    if func not in _REBOUND:
        names = {getattr(f, "__name__", ""): replacement for f, replacement in FUNCTIONS.items()}
        used = {name: names[name] for name in func.__code__.co_names if name in names}
        space = {**func.__globals__, **used, "has_torch_function": lambda *_: False} if used else None
        copied = (
            types.FunctionType(func.__code__, space, func.__name__, func.__defaults__, func.__closure__)
            if space
            else func
        )
        if space:
            copied.__kwdefaults__ = func.__kwdefaults__
        _REBOUND[func] = copied
    return _REBOUND[func]


def _on_host(value: Any) -> Any:
    """Return the trace's device in place of a card's."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _float32(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


def use_foreach(optimizers: list[torch.optim.Optimizer]) -> None:
    """Let copied optimizers update all parameters of a group together, as is the default on a card."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        asked = group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable")
        if asked and not any("Adafactor" in type(optimizer).__name__ for optimizer in optimizers):
            group["foreach"] = True
