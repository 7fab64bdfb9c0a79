"""Settings of matrix products and convolution algorithms on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from weftplan import config
from weftplan.ops.core.schema import Params
from weftplan.support.tensor_cores import allows_tf32

OFF, LIMITED, FASTEST = 0, 1, 2


class Tuning(NamedTuple):
    """Settings of the CUDA libraries.

    Attributes:
        autotune: choice of convolution algorithms. 0: the library's recommendation; 1: the fastest measured algorithm
            within the workspace limit; 2: the fastest measured algorithm.
        tensor_cores: whether products may round float32 to TF32.
    """

    autotune: int = OFF
    tensor_cores: bool = False


class _Planned(threading.local):
    gpu: int | None = None


_planned = _Planned()


@contextmanager
def planned_for(gpu: int) -> Iterator[None]:
    """Within the ``with`` block, implementations on this thread plan for GPU ``gpu`` instead of the current GPU."""
    outer, _planned.gpu = _planned.gpu, gpu
    try:
        yield
    finally:
        _planned.gpu = outer


def planned_gpu() -> int | None:
    """Return the GPU that :func:`planned_for` sets for this thread; None: the current GPU."""
    return _planned.gpu


def tuning(node_tune: str | None = None) -> Tuning:
    """Return the current settings; ``node_tune``, a node's parameter ``cudnn_tune``, takes precedence unless None."""
    level = config.get("MXNET_CUDNN_AUTOTUNE_DEFAULT")
    if not level and config.get("FLAGS_cudnn_exhaustive_search"):
        level = LIMITED
    if node_tune is not None:
        level = {"off": OFF, "limited_workspace": LIMITED, "fastest": FASTEST}[node_tune]
    return Tuning(int(level), allows_tf32())


def workspace_limit(params: Params) -> int:
    """Return the maximum scratch bytes of a convolution's algorithm."""
    limit = config.get("FLAGS_conv_workspace_size_limit")
    return int(params["workspace"] if limit < 0 else min(limit, params["workspace"])) << 20
