"""Pulls of selected rows of a stored value into ``row_sparse`` arrays, whose memory is dense in this package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from weftplan import ndarray as nd
from weftplan.errors import KVStoreError
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray


def with_rows(groups: Sequence[tuple[Key, list[NDArray]]], row_ids: object) -> list[tuple[Key, NDArray, NDArray]]:
    """Return (key, array to fill, array of row numbers) for each array of a call.

    ``row_ids`` is an array, or nested lists of them, with one array for all or one for each array to fill.

    Raises:
        KVStoreError: the number of ``row_ids`` arrays is wrong, or an array to fill is not ``row_sparse``.
    """
    arrays = [(key, array) for key, group in groups for array in group]
    rows = list(_flatten(row_ids))
    if len(rows) == 1:
        rows *= len(arrays)
    if len(rows) != len(arrays):
        raise KVStoreError(f"row_sparse_pull: {len(rows)} arrays of row_ids for {len(arrays)} arrays to fill")
    for key, array in arrays:
        if array.stype != "row_sparse":
            raise KVStoreError(f"row_sparse_pull: key {key!r}: out must be row_sparse, got {array.stype!r}; use pull")
    return [(key, array, numbers) for (key, array), numbers in zip(arrays, rows, strict=True)]


def without_rows(arrays: list[NDArray]) -> list[NDArray]:
    """Return the arrays of storage type ``default``; the same list object if all are plain NDArrays."""
    for array in arrays:
        if array.__class__ is not NDArray:
            return [array for array in arrays if array.stype == "default"]
    return arrays


def copy_rows(stored: NDArray, array: NDArray, rows: NDArray) -> None:
    """Copy the rows of ``stored`` whose numbers are in ``rows`` to ``array``, and set its other rows to 0.

    The call waits until ``rows`` has been computed; the copy is an engine operation.
    """
    mask = np.zeros((stored.shape[0], *[1] * (stored.ndim - 1)), stored.np_dtype)
    mask[rows.asnumpy().astype(np.int64).reshape(-1)] = 1
    near = stored.as_in_context(array.context)
    nd.where(
        nd.broadcast_to(nd.array(mask, array.context, mask.dtype), near.shape), near, nd.zeros_like(near), out=array
    )


def _flatten(arrays: object) -> Iterator[NDArray]:
    """Yield the arrays of nested lists."""
    if isinstance(arrays, NDArray):
        yield arrays
        return
    for item in cast("Iterable[object]", arrays):
        yield from _flatten(item)
