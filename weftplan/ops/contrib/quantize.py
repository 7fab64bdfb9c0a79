"""8-bit quantization: ``_contrib_quantize``, ``_contrib_quantize_v2``, ``_contrib_dequantize``.

``_contrib_quantize_v2`` scales the largest magnitude of a range to 127.5 (int8) or 255.5 (uint8, for ranges without
negative values), ``_contrib_quantize`` to 127 or 255. Both then round, and clip to -127..127 or 0..255, as MXNet
1.9.1's wheels for CPUs do. No other operator computes with these integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.errors import DTypeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import p_enum, p_float, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape
from weftplan.ops.core.schema import Op, Param, Params
from weftplan.support.array_types import ArrayModule, DType, RawArray

_FLOAT = np.dtype(np.float32)
_SCALAR = (1,)
_REACH = {"uint8": 255.5, "int8": 127.5, "int32": 2.0**31 - 1}
"""The scaled value, before rounding, of the largest magnitude of the range."""
_LIMITS = {"uint8": 255, "int8": 127}


def _shapes(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "data and output of a quantization")
    ranges: Shapes = [merge_shape(shape, _SCALAR, "a range of a quantization") for shape in ins[1:]]
    return [data, *ranges], [data, *(merge_shape(s, _SCALAR, "a range of a quantization") for s in outs[1:])]


def _kind(params: Params) -> DType:
    """Return the dtype of the result; ``auto`` is uint8 if the calibrated range has no negative values."""
    kind = params["out_type"]
    if kind == "auto":
        least = params["min_calib_range"]
        kind = "uint8" if least is not None and least >= 0 else "int8"
    return np.dtype(kind)


def _dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    inputs: DTypes = [merge_dtype(dtype, _FLOAT, "input of a quantization") for dtype in ins]
    kinds = [_kind(params), _FLOAT, _FLOAT]
    return inputs, [merge_dtype(out, kind, "output of a quantization") for out, kind in zip(outs, kinds, strict=True)]


def _fill(out: RawArray | None, value: RawArray) -> None:
    if out is not None:
        out[...] = value


@kernel(scratch=lambda p, data, *outputs: [(data.shape, _FLOAT)])
def _quantize(xp: ArrayModule, p: Params, *arrays: Any) -> None:
    *inputs, output, min_output, max_output, rounded = arrays
    x = inputs[0]
    has_ranges = len(inputs) == 3
    if has_ranges:
        least, greatest = inputs[1], inputs[2]
    elif p["min_calib_range"] is not None and p["max_calib_range"] is not None:
        least, greatest = (xp.full(_SCALAR, p[key], _FLOAT) for key in ("min_calib_range", "max_calib_range"))
    else:
        least, greatest = xp.min(x).reshape(_SCALAR), xp.max(x).reshape(_SCALAR)
    kind = _kind(p)
    reach = xp.maximum(xp.abs(least), xp.abs(greatest))
    if kind == np.int8:
        least, greatest = -reach, reach
    if output is not None:
        # If both limits of the range are 0, the output is 0.
        factor = (_LIMITS if has_ranges else _REACH)[kind.name] / xp.where(reach > 0, reach, np.inf)
        xp.multiply(x, factor.astype(_FLOAT).reshape(()), out=rounded)
        xp.clip(xp.rint(rounded, out=rounded), 0 if kind == np.uint8 else -127, _LIMITS[kind.name], out=rounded)
        xp.copyto(output, rounded, casting="unsafe")
    _fill(min_output, least)
    _fill(max_output, greatest)


def _dequantize_dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    if ins[0] is not None and ins[0] not in (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.int32)):
        raise DTypeError(f"_contrib_dequantize: data must be uint8, int8 or int32, got {ins[0]}")
    ranges: DTypes = [merge_dtype(dtype, _FLOAT, "range of a quantization") for dtype in ins[1:]]
    return [ins[0], *ranges], [merge_dtype(outs[0], _FLOAT, "output of _contrib_dequantize")]


@kernel
def _dequantize(
    xp: ArrayModule, p: Params, data: RawArray, min_range: RawArray, max_range: RawArray, out: RawArray
) -> None:
    (x, least, greatest) = (data, min_range, max_range)
    reach = xp.maximum(xp.abs(least), xp.abs(greatest))
    xp.copyto(out, x, casting="unsafe")
    xp.multiply(out, (reach / _REACH[x.dtype.name]).astype(_FLOAT), out=out)


_RANGE = ("output0", "output1", "output2")
register(
    Op(
        name="_contrib_quantize",
        forward=_quantize,
        infer_shape=_shapes,
        infer_dtype=_dtypes,
        params=(Param("out_type", p_enum("int8", "uint8"), "uint8", "Dtype of the result."),),
        inputs=("data", "min_range", "max_range"),
        outputs=_RANGE,
        doc="Floats of a range as 8-bit integers, and the range for which they stand.",
    )
)
register(
    Op(
        name="_contrib_quantize_v2",
        forward=_quantize,
        infer_shape=_shapes,
        infer_dtype=_dtypes,
        params=(
            Param("out_type", p_enum("auto", "int8", "uint8"), "int8", "Dtype of the result; auto: by the range."),
            Param("min_calib_range", p_optional(p_float), None, "Least number of the range; None: of the data."),
            Param("max_calib_range", p_optional(p_float), None, "Largest number of the range; None: of the data."),
        ),
        outputs=_RANGE,
        doc="Floats as 8-bit integers, of a range that was measured before or of what the data have.",
    )
)
register(
    Op(
        name="_contrib_dequantize",
        forward=_dequantize,
        infer_shape=_shapes,
        infer_dtype=_dequantize_dtypes,
        params=(Param("out_type", p_enum("float32"), "float32", "Dtype of the result."),),
        inputs=("data", "min_range", "max_range"),
        doc="8-bit (or 32-bit) integers of a range as the floats that they stand for.",
    )
)
