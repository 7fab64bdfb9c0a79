"""Golden cases of MXNet's contributed operators and of densities of random distributions (pure data)."""

CASES = []


def _add(op, *inputs, **more):
    CASES.append({"op": op, "inputs": list(inputs), **more})


def _tensor(value, dtype="float32"):
    return {"value": value, "dtype": dtype}


_SAMPLES = _tensor([[1.0, 3.0, 2.0], [4.0, 1.0, 2.0]], "float64")
_PARAMETERS = {
    "uniform": ([0.0, -1.0], [5.0, 4.5]),
    "normal": ([1.0, 2.0], [0.5, 2.0]),
    "gamma": ([0.5, 3.0], [2.0, 0.7]),
    "exponential": ([0.5, 2.0],),
    "poisson": ([0.5, 3.0],),
    "negative_binomial": ([1.5, 4.0], [0.3, 0.8]),
    "generalized_negative_binomial": ([1.5, 2.0], [0.3, 1.8]),
}
for _is_log in (False, True):
    for _name, _values in _PARAMETERS.items():
        _add(f"_random_pdf_{_name}", _SAMPLES, *(_tensor(one, "float64") for one in _values),
             params={"is_log": _is_log}, name=f"pdf {_name} {_is_log}")  # fmt: skip
    _add("_random_pdf_dirichlet", _tensor([[[0.2, 0.8], [0.5, 0.5]], [[0.1, 0.9], [0.25, 0.75]]], "float64"),
         _tensor([[0.5, 1.5], [2.0, 0.7]], "float64"), params={"is_log": _is_log},
         name=f"pdf dirichlet {_is_log}")  # fmt: skip

_add("_contrib_quadratic", (3, 4), params={"a": 1.5, "b": -2.0, "c": 0.25}, name="quadratic")
_add("_contrib_gradientmultiplier", (3, 4), params={"scalar": -0.5}, name="gradientmultiplier")
for _axes in (None, (1,), (-1, 0)):
    _add("_contrib_index_array", (2, 3, 4), params={} if _axes is None else {"axes": _axes},
         name=f"index_array {_axes}", grad=False)  # fmt: skip
for _places, _rows in (([0, 4, 2], (3, 3)), ([3], (1, 3)), ([1.7, 0.0, 1.2], (3, 3))):
    _add("_contrib_index_copy", (5, 3), _tensor(_places), _rows, name=f"index_copy {_places}", grad=[0, 2])
_add("_contrib_index_copy", (4,), _tensor([2, 0], "int32"), (2,), name="index_copy of a vector", grad=[0, 2])

_REGIONS = ({"begin": (0, 1), "end": (2, 3)}, {"begin": (None, 3), "end": (None, None), "step": (1, -2)})
for _region, _part in zip(_REGIONS, ((2, 2), (3, 2))):  # noqa: B905  (MXNet's Python may be 3.8)
    _add("_slice_assign", (3, 4), _part, params=_region, grad=False, name=f"slice_assign {_part}")
    _add("_slice_assign_scalar", (3, 4), params={"scalar": 7.0, **_region}, grad=False,
         name=f"slice_assign_scalar {_part}")  # fmt: skip

_VECTORS = ((3,), (3,), (3,), {"shape": (3,), "low": 0.5, "high": 2.0})
for _number, (_shape, _train, _more) in enumerate((
    ((4, 3, 2, 5), True, {"fix_gamma": False}),
    ((4, 3, 2, 5), True, {}),
    ((4, 3, 2, 5), False, {"fix_gamma": False}),
    ((6, 3), True, {"fix_gamma": False, "eps": 0.1, "momentum": 0.3}),
    ((4, 3, 5), True, {"fix_gamma": False, "output_mean_var": True}),
    ((2, 3, 2, 2, 2), True, {"use_global_stats": True, "fix_gamma": False}),
)):  # fmt: skip
    # In MXNet, layers of one key share their state, and the moving statistics change in the backward pass.
    _add("_contrib_SyncBatchNorm", _shape, *_VECTORS, params={"key": f"golden{_number}", **_more}, is_train=_train,
         grad=_train)  # fmt: skip
