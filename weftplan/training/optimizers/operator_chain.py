"""Chains of operator calls that update one weight, for optimizers whose step is not elementwise.

A chain is pushed as single operations, or the chains of many weights run in one operation; the kernels and their order
are the same. The functions are stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from weftplan import device
from weftplan import ndarray as nd
from weftplan.kvstore.stages import HOST
from weftplan.ndarray import NDArray
from weftplan.ndarray.calls.resolved_call import SettledCall, settled
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.node_call import NodeCall
from weftplan.ops.core.products import MOST
from weftplan.ops.core.schema import Op, aligned
from weftplan.support.core_sharing import split_in_rooms


class OperatorCall(NamedTuple):
    """A call of an operator with one output.

    Attributes:
        inputs: numbers of arrays: the weight, its gradient, its states, then the results of the calls so far.
        in_place: the output is the weight; otherwise it is a new array.
    """

    op: str
    inputs: tuple[int, ...]
    params: dict[str, Any]
    in_place: bool = False


_Plan = tuple[Op, SettledCall]


class _Spec(NamedTuple):
    """An array that does not exist yet."""

    shape: tuple[int, ...]
    dtype: Any


def push_chain(chain: Sequence[OperatorCall], arrays: Sequence[NDArray]) -> None:
    """Push the calls as single operations."""
    values = [*arrays]
    for call in chain:
        out = {"out": values[0]} if call.in_place else {}
        values.append(getattr(nd, call.op)(*[values[index] for index in call.inputs], **call.params, **out))


def chain_work(
    chains: Sequence[Sequence[OperatorCall]], rows: Sequence[Sequence[NDArray]], *, narrow: bool
) -> tuple[Callable[[Sequence[Any], Any], None], int]:
    """Return a function that runs the chains on the raw arrays of all rows, and its scratch bytes.

    Args:
        rows: arrays of each chain.
        narrow: gradients are in half precision; each row of raw arrays ends with a weight in half precision, which gets
            the new weight, rounded.
    """
    target_device = device.get(rows[0][0].context)
    on_gpu = target_device.context.device_type == "gpu"
    plans = [_plans(chain, row, on_gpu=on_gpu) for chain, row in zip(chains, rows, strict=True)]
    count = len(rows[0])
    nbytes = max(_scratch_bytes(plan, row, narrow=narrow) for plan, row in zip(plans, rows, strict=True))
    parts = min(MOST, len(chains)) if target_device.context.device_type in HOST else 1

    def run(raws: Sequence[Any], scratch: Any) -> None:
        def part(number: int, offset: int) -> None:
            mine = scratch[offset * nbytes : (offset + 1) * nbytes]
            for which in range(number, len(chains), parts):
                begin = which * (count + narrow)
                _run(
                    chains[which],
                    plans[which],
                    raws[begin : begin + count + narrow],
                    mine,
                    target_device,
                    narrow=narrow,
                )

        split_in_rooms(part, parts)

    return run, nbytes * parts


def _run(
    chain: Sequence[OperatorCall],
    plans: Sequence[_Plan],
    raws: Sequence[Any],
    scratch: Any,
    target_device: Any,
    *,
    narrow: bool,
) -> None:
    """Run one chain on raw arrays."""
    values = [*raws]
    if narrow:
        rounded = values.pop()
    offset = 0

    def new(shape: tuple[int, ...], dtype: Any) -> Any:
        nonlocal offset
        nbytes = prod(shape) * dtype.itemsize
        array = scratch[offset : offset + nbytes].view(dtype).reshape(shape)
        offset += aligned(nbytes)
        return array

    if narrow:
        values[1] = new(values[0].shape, values[0].dtype)
        values[1][...] = raws[1]
    for call, (op, plan) in zip(chain, plans, strict=True):
        _, shape, dtype = plan.outputs[0]
        out = values[0] if call.in_place else new(shape, dtype)
        workspace = scratch[offset : offset + plan.workspace] if plan.workspace else None
        inputs = [values[index] for index in call.inputs]
        node = NodeCall(op, plan.kernel, plan.params, target_device.xp, inputs, [out], workspace=workspace)
        tiling.bound(tiling.of(target_device.context.device_type), node.bound(is_train=False, random_key=(0, 0)))()
        values.append(out)
    if narrow:
        rounded[...] = values[0]


def _plans(chain: Sequence[OperatorCall], row: Sequence[NDArray], *, on_gpu: bool) -> list[_Plan]:
    values: list[Any] = [*row]
    values[1] = _Spec(values[1].shape, values[0].dtype)
    plans = []
    for call in chain:
        op = registry.get(call.op)
        plan = settled(op, [values[index] for index in call.inputs], call.params, (), on_gpu)
        plans.append((op, plan))
        values.append(_Spec(*plan.outputs[0][1:]))
    return plans


def _scratch_bytes(plans: Sequence[_Plan], row: Sequence[NDArray], *, narrow: bool) -> int:
    """Return the bytes of all results of a chain and of the largest workspace."""
    results = sum(aligned(plan.outputs[0][0]) for _, plan in plans)
    return results + narrow * aligned(row[0].nbytes) + max(plan.workspace for _, plan in plans)
