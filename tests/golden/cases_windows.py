"""Golden cases of Correlation, im2col, col2im, and the operators of MXNet's first releases (pure data)."""

CASES = []


def _add(op, *inputs, **more):
    CASES.append({"op": op, "inputs": list(inputs), **more})


for _params in (
    {}, {"pad_size": 1}, {"kernel_size": 3, "max_displacement": 2, "stride1": 2, "stride2": 2, "pad_size": 3},
    {"max_displacement": 3, "stride2": 2, "pad_size": 3}, {"stride1": 2, "pad_size": 2, "max_displacement": 2},
):  # fmt: skip
    _add("Correlation", (2, 3, 6, 7), (2, 3, 6, 7), params=_params)
    _add("Correlation", (2, 3, 6, 7), (2, 3, 6, 7), params={**_params, "is_multiply": False})
for _params in (
    {"kernel": (2, 3)}, {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)}, {"kernel": (2, 2), "dilate": (2, 3)},
    {"kernel": (3, 3), "stride": (3, 2), "dilate": (1, 2), "pad": (2, 0)}, {"kernel": (1, 1), "stride": (2, 2)},
):  # fmt: skip
    _add("im2col", (2, 3, 6, 7), params=_params)
for _params, _windows in (
    ({"kernel": (2, 3)}, 25), ({"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)}, 24),
    ({"kernel": (2, 2), "dilate": (2, 3)}, 16),
):  # fmt: skip
    _rows = 3 * _params["kernel"][0] * _params["kernel"][1]
    _add("col2im", (2, _rows, _windows), params={**_params, "output_size": (6, 7)})

_MOVES = {"low": -2.5, "high": 2.5}
for _data, _offset, _params in (
    ((2, 4, 5, 6), (2, 18, 5, 6), {"kernel": (3, 3), "pad": (1, 1), "num_filter": 3}),
    ((1, 4, 7, 6), (1, 24, 3, 8), {"kernel": (3, 2), "stride": (2, 1), "dilate": (1, 2), "pad": (0, 2),
                                   "num_filter": 4, "num_group": 2, "num_deformable_group": 2, "no_bias": True}),
    ((2, 2, 3, 4), (2, 4, 3, 4), {"kernel": (1, 1), "num_filter": 2, "num_deformable_group": 2}),
):  # fmt: skip
    _filters, _group = _params["num_filter"], _params.get("num_group", 1)
    _weight = (_filters, _data[1] // _group, *_params["kernel"])
    _bias = [] if _params.get("no_bias") else [(_filters,)]
    _add("_contrib_DeformableConvolution", _data, {"shape": _offset, **_MOVES}, _weight, *_bias, params=_params)

# ------------------------------------------------------------------------------------------ operators of old networks
_WHOLE = {"value": [[[[(7 * y + 3 * x) % 4 - 2.0 for x in range(6)] for y in range(5)]]]}  # equal maxima
for _type in ("max", "avg", "sum"):
    for _window in (
        {"kernel": (2, 2), "stride": (2, 2)},
        {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)},
        {"kernel": (3, 3), "stride": (2, 2), "pooling_convention": "full"},
        {"kernel": (2, 3), "stride": (3, 4), "pad": (1, 1), "pooling_convention": "full"},  # a window of no elements
        {"kernel": (1, 2), "pad": (2, 3)},
        {"global_pool": True, "kernel": (2, 2), "pad": (1, 1)},
        {"global_pool": True},
    ):
        _add("Pooling_v1", (1, 2, 5, 6), params={"pool_type": _type, **_window})
        _add("Pooling_v1", _WHOLE, params={"pool_type": _type, **_window})
for _params in (
    {"fix_gamma": False, "output_mean_var": True},
    {"use_global_stats": True, "eps": 0.1},
    {"momentum": 0.3},
):
    for _train in (True, False):
        _add(
            "BatchNorm_v1", (4, 3, 2, 3), (3,), (3,), (3,), {"shape": (3,), "low": 0.5, "high": 2.0},
            params=_params, is_train=_train, grad=_train,
        )  # fmt: skip
for _params in (
    {"kernel": (2, 3), "num_filter": 4}, {"kernel": (3, 2), "num_filter": 4, "stride": (2, 1), "pad": (1, 2)},
    {"kernel": (2, 2), "num_filter": 2, "dilate": (2, 3)},
):  # fmt: skip
    _add(
        "Convolution_v1",
        (2, 3, 6, 7),
        (_params["num_filter"], 3, *_params["kernel"]),
        (_params["num_filter"],),
        params=_params,
    )
