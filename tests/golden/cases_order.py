"""Golden cases of operators that sort, accumulate, slice and rearrange (pure data)."""

CASES = []


def _add(op, *inputs, **kwargs):
    CASES.append({"op": op, "inputs": list(inputs), **kwargs})


DISTINCT = {"shape": (4, 5), "distinct": True}
DEEP = {"shape": (2, 5, 3), "distinct": True}
TIES = {"value": [[3.0, 1.0, 2.0, 2.0], [0.0, 5.0, 5.0, -1.0]]}
INTS = {"value": [[3, 1, 2], [-7, 9, 0]], "dtype": "int32"}
HOLES = {"value": [[float("nan"), 1.5, -2.0], [2.0, 3.0, 0.5], [float("nan")] * 3]}

for _params in ({}, {"axis": 0}, {"axis": None}, {"is_ascend": False}, {"axis": 1, "is_ascend": False}):
    # MXNet 1.9.1 cannot differentiate sort unless its axis is written out.
    _add("sort", DISTINCT, params=_params, grad=_params.get("axis") is not None)
    _add("argsort", DISTINCT, params=_params)
    _add("sort", TIES, params=_params, grad=False)
    _add("sort", INTS, params=_params, grad=False)
_add("sort", DEEP, params={"axis": 1})
_add("argsort", DEEP, params={"axis": 1, "dtype": "int32"})
for _params in ({}, {"k": 2}, {"k": 0}, {"k": 3, "axis": 0}, {"k": 2, "axis": None}, {"k": 2, "is_ascend": True}):
    _add("topk", DISTINCT, params=_params)
    _add("topk", DISTINCT, params={**_params, "ret_typ": "value"})
    _add("topk", DISTINCT, params={**_params, "ret_typ": "mask"}, grad=False)
_add("topk", DISTINCT, params={"k": 2, "ret_typ": "both", "dtype": "int32"}, grad=False)
_add("topk", DEEP, params={"k": 2, "ret_typ": "value", "axis": 1})
_add("argmax_channel", DISTINCT, grad=False)
_add("argmax_channel", DEEP, grad=False)
for _params in ({}, {"axis": 1}, {"axis": 0, "keepdims": True}, {"axis": 0, "exclude": True}):
    _add("nansum", HOLES, params=_params)
    _add("nanprod", HOLES, params=_params)
_add("nansum", INTS, grad=False)
_add("shape_array", (2, 3, 4), grad=False)
_add("size_array", (2, 3, 4), grad=False)
for _params in ({}, {"k": 1}, {"k": -2}):
    _add("diag", (4,), params=_params)
    _add("diag", (4, 5), params=_params)
_add("diag", (2, 3, 4), params={})
_add("diag", (2, 3, 4), params={"axis1": 0, "axis2": -1, "k": 1})
_add("depth_to_space", (2, 8, 2, 3), params={"block_size": 2})
_add("space_to_depth", (2, 2, 6, 3), params={"block_size": 3})
for _params in ({}, {"axis": 0}, {"axis": 1}):
    _add("cumsum", (3, 4), params=_params)
    _add("cumsum", INTS, params=_params, grad=False)
_add("_split_v2", (2, 5), params={"indices": (0, 1, 3), "axis": 1})
_add("_split_v2", (3, 4), params={"indices": (), "sections": 3, "axis": 0, "squeeze_axis": True})
_add("_split_v2", (3, 4), params={"indices": (), "sections": 2, "axis": -1})
