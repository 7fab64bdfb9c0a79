"""Golden cases of attention, mixed precision and resizing (pure data).

Generate them with MXNET_MKLDNN_ENABLED=0, because oneDNN has no amp operators for some dtypes.
"""

CASES = []


def _add(op, *inputs, **more):
    CASES.append({"op": op, "inputs": list(inputs), **more})


for _heads, _batch, _steps, _units in ((1, 2, 3, 4), (3, 2, 4, 2), (2, 1, 1, 1), (4, 3, 5, 3)):
    _width, _rows = _heads * _units, _heads * _batch
    _p = {"heads": _heads}
    _add("_contrib_interleaved_matmul_selfatt_qk", (_steps, _batch, 3 * _width), params=_p)
    _add("_contrib_interleaved_matmul_selfatt_valatt", (_steps, _batch, 3 * _width), (_rows, _steps, _steps), params=_p)
    _add("_contrib_interleaved_matmul_encdec_qk", (_steps, _batch, _width), (6, _batch, 2 * _width), params=_p)
    _add("_contrib_interleaved_matmul_encdec_valatt", (6, _batch, 2 * _width), (_rows, _steps, 6), params=_p)
_add("_contrib_div_sqrt_dim", (3, 2, 5))
for _params in ({}, {"start": 2.5, "step": -0.5}, {"axis": 1}, {"axis": -1, "start": 1.0}, {"repeat": 3}):
    _add("_contrib_arange_like", (2, 3, 4), params=_params, grad=False)
for _from, _to in (("float32", "float16"), ("float16", "float32"), ("float32", "float32"), ("int32", "float16"),
                   ("float32", "float64"), ("float64", "float32")):  # fmt: skip
    _add("amp_cast", {"shape": (2, 3), "dtype": _from, "low": -5, "high": 5}, params={"dtype": _to})
_MIXED = [
    {"shape": (2, 3), "dtype": "float16"},
    {"shape": (3,), "dtype": "float32"},
    {"shape": (1, 2), "dtype": "float16"},
]
_add("amp_multicast", *_MIXED, params={"num_outputs": 3})
_add("amp_multicast", *_MIXED, params={"num_outputs": 3, "cast_narrow": True})
_add("amp_multicast", *_MIXED[::2], params={"num_outputs": 2})
_add("amp_multicast", _MIXED[1], params={"num_outputs": 1})

_IMAGE = (2, 3, 5, 7)
for _align in (True, False):
    for _height, _width in ((10, 14), (3, 2), (5, 7), (1, 1), (8, 1)):
        _p = {"height": _height, "width": _width, "align_corners": _align}
        _add("_contrib_BilinearResize2D", _IMAGE, params=_p)
    _add("_contrib_BilinearResize2D", (1, 2, 1, 1), params={"height": 3, "width": 2, "align_corners": _align})
_SCALES = {"scale_height": 1.7, "scale_width": 0.5}
_add("_contrib_BilinearResize2D", _IMAGE, params=_SCALES)
_add("_contrib_BilinearResize2D", (1, 1, 4, 5), params={"mode": "odd_scale", "scale_height": 2.0, "scale_width": 2.0})
_add("_contrib_BilinearResize2D", _IMAGE, (2, 3, 4, 9), params={"mode": "like"}, grad=(0,))
for _mode in ("to_even_down", "to_even_up", "to_odd_down", "to_odd_up"):
    _add("_contrib_BilinearResize2D", (1, 2, 5, 6), params={"mode": _mode})
for _size in ((), (1,), (3,), (2, 5), (7, 9), (5, 7)):
    _add("_contrib_AdaptiveAvgPooling2D", _IMAGE, params={"output_size": _size} if _size else {})
