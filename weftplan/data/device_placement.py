"""Placement of batches on devices: splitting, page-locked host memory, and copies on copy queues.

A batch takes its page-locked memory and its device memory from the storage pools when it is read. Both return to the
pools when the batch is released, and the next batch reuses them. The prefetch depth bounds the memory in flight. Called
from the thread that reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from weftplan.data.batch import DataBatch
from weftplan.device.context import Context, cpu_pinned
from weftplan.errors import BindError, ParameterError
from weftplan.ndarray import NDArray, empty
from weftplan.ndarray.base import pending
from weftplan.ndarray.copying import copy_into

Placed = Mapping[tuple[Context, int, int], NDArray]
"""(device, first row, end) -> these rows of an array, on that device."""


def split_batch(batch_size: int, parts: int, loads: Sequence[float] | None = None) -> list[slice]:
    """Split a batch into consecutive slices: of nearly equal length, longer slices last, or in proportion to ``loads``.

    Raises:
        BindError: a slice would be empty.

    >>> split_batch(5, 2)
    [slice(0, 2, None), slice(2, 5, None)]
    >>> split_batch(8, 2, [1, 3])
    [slice(0, 2, None), slice(2, 8, None)]
    """
    if batch_size < parts:
        raise BindError(f"a batch of {batch_size} samples cannot be split over {parts} contexts: make it larger")
    if loads is not None and len(set(loads)) > 1:
        return split_by_loads(batch_size, loads)
    edges = [batch_size * i // parts for i in range(parts + 1)]
    return [slice(lo, hi) for lo, hi in pairwise(edges)]


def split_by_loads(batch_size: int, loads: Sequence[float]) -> list[slice]:
    """Split a batch in proportion to ``loads``, rounded as in MXNet: the last slice has the rest.

    Raises:
        BindError: a slice would be empty.
    """
    sizes = [round(load * batch_size / sum(loads)) for load in loads]
    edges = [min(edge, batch_size) for edge in accumulate(sizes[:-1], initial=0)] + [batch_size]
    if any(low >= high for low, high in pairwise(edges)):
        raise BindError(
            f"a batch of {batch_size} samples split in the proportions {list(loads)} leaves a context without samples: "
            f"make the batch larger"
        )
    return [slice(lo, hi) for lo, hi in pairwise(edges)]


def check_contexts(ctx: Context | Sequence[Context] | None) -> list[Context]:
    """Return the contexts as a list.

    Raises:
        ParameterError: something else, or a context that occurs twice.
    """
    contexts = [] if ctx is None else [ctx] if isinstance(ctx, Context) else list(ctx)
    if any(not isinstance(context, Context) for context in contexts) or len({*contexts}) != len(contexts):
        raise ParameterError(f"ctx must be a context or a list of contexts, each once, got {ctx!r}")
    return contexts


def placed(batch: DataBatch, contexts: Sequence[Context]) -> DataBatch:
    """Return the batch in page-locked memory, with asynchronous copies to these contexts pushed."""
    arrays = [copy_to_devices(array, contexts) for array in (*batch.data, *batch.label)]
    hosts = [host for host, _ in arrays]
    batch_copy = DataBatch(
        hosts[: len(batch.data)],
        hosts[len(batch.data) :],
        batch.pad,
        batch.index,
        getattr(batch, "bucket_key", None),
        getattr(batch, "provide_data", None),
        getattr(batch, "provide_label", None),
    )
    batch_copy.placed = [copies for _, copies in arrays]
    return batch_copy


V = TypeVar("V")


def copy_to_devices(value: V, contexts: Sequence[Context]) -> tuple[V | NDArray, Placed]:
    """Return an array in page-locked memory, and the pushed copies of each device's samples (along the first axis).
    Contexts without streams receive no copy."""
    devices = [context for context in contexts if context.has_streams]
    if not devices or not isinstance(value, NDArray) or not value.shape or value.shape[0] < len(contexts):
        return value, {}
    pinned = _page_locked(value, devices[0])
    parts = zip(contexts, split_batch(value.shape[0], len(contexts)), strict=True)
    return pinned, {
        (context, part.start, part.stop): _copied(pinned.slice_at(part.start, part.stop), context)
        for context, part in parts
        if context.has_streams
    }


def _copied(part: NDArray, device: Context) -> NDArray:
    target = pending(NDArray, device, part.shape, part.np_dtype, "batch")
    copy_into(part, target, name="batch")
    return target


def _page_locked(array: NDArray, device: Context) -> NDArray:
    if array.context.device_type != "cpu":
        return array
    home = cpu_pinned(device.device_id if device.device_type == "gpu" else 0)
    pinned = empty(array.shape, ctx=home, dtype=array.np_dtype)
    array.wait_to_read()
    np.copyto(pinned.raw(), array.raw())  # not shared yet: no engine operation uses it
    return pinned
