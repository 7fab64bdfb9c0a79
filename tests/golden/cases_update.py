"""Golden cases of optimizer steps and of statistics over several arrays (pure data)."""

from itertools import product

CASES = []
POSITIVE = {"shape": (3, 4), "low": 0.1, "high": 1.0}


def _add(op, *inputs, dtypes=("float32", "float64"), **params):
    for dtype in dtypes:
        arguments = [x if "dtype" in x else {**x, "dtype": dtype} for x in inputs]
        CASES.append({"op": op, "inputs": arguments, "params": params, "imperative": True})
        if op.endswith("lamb_update_phase2"):
            CASES[-1]["name"] = f"{op} {[x['value'] for x in arguments[2:4]]} {sorted(params.items())} {dtype}"
        if dtype == "float16":
            CASES[-1].update(rtol=2e-3, atol=2e-3)  # weftplan rounds once, MXNet at each operation


W = {"shape": (3, 4)}
WIDE = {"shape": (3, 4), "dtype": "float32"}
for _extra in ({}, {"wd": 0.1, "rescale_grad": 0.5}, {"wd": 0.2, "rescale_grad": 2.0, "clip_gradient": 0.4}):
    _lr = {"lr": 0.1, **_extra}
    _add("signsgd_update", W, W, **_lr)
    _add("signum_update", W, W, W, momentum=0.9, **_lr)
    _add("signum_update", W, W, W, momentum=0.9, wd_lh=0.05, **_lr)
    _add("nag_mom_update", W, W, W, momentum=0.9, **_lr)
    _add("rmsprop_update", W, W, POSITIVE, **_lr)
    _add("rmsprop_update", W, W, POSITIVE, gamma1=0.5, epsilon=1e-3, clip_weights=0.3, **_lr)
    _add("rmspropalex_update", W, W, {"shape": (3, 4), "low": 1.0, "high": 2.0}, POSITIVE, W, **_lr)
    _add("rmspropalex_update", W, W, {"shape": (3, 4), "low": 1.0, "high": 2.0}, POSITIVE, W, gamma1=0.8, gamma2=0.5,
         epsilon=1e-3, clip_weights=0.3, **_lr)  # fmt: skip
    _add("ftrl_update", W, W, W, POSITIVE, **_lr)
    _add("ftrl_update", W, W, W, POSITIVE, lamda1=0.5, beta=2.0, **_lr)
    _ftml = {("clip_grad" if key == "clip_gradient" else key): value for key, value in _lr.items()}
    _add("ftml_update", W, W, POSITIVE, POSITIVE, W, t=1, **_ftml)
    _add("ftml_update", W, W, POSITIVE, POSITIVE, W, t=7, beta1=0.8, beta2=0.9, epsilon=1e-4, **_ftml)
    for _t, _correct in product((1, 5), (True, False)):
        _phase = {"wd": 0.1, **_extra, "t": _t, "bias_correction": _correct}
        _add("lamb_update_phase1", W, W, W, POSITIVE, **_phase)
        _add("mp_lamb_update_phase1", W, W, WIDE, {**POSITIVE, "dtype": "float32"}, WIDE, dtypes=("float16",), **_phase)
    _half = ("float16", "float32")
    _add("mp_sgd_update", W, W, WIDE, dtypes=_half, **_lr)
    _add("mp_sgd_mom_update", W, W, WIDE, WIDE, dtypes=_half, momentum=0.9, **_lr)
    _add("mp_nag_mom_update", W, W, WIDE, WIDE, dtypes=_half, momentum=0.9, **_lr)


def _wide_norms(*norms):
    return [{"value": [norm], "dtype": "float32"} for norm in norms]


for _bounds in ({}, {"lower_bound": 3.0}, {"upper_bound": 1.5}, {"lower_bound": 0.5, "upper_bound": 1.0}):
    _add("lamb_update_phase2", W, W, {"value": [2.0]}, {"value": [3.0]}, lr=0.1, **_bounds)
    _add("mp_lamb_update_phase2", W, WIDE, *_wide_norms(2.0, 3.0), WIDE, dtypes=("float16",), lr=0.1, **_bounds)
for _norms in ((0.0, 3.0), (2.0, 0.0)):
    _add("lamb_update_phase2", W, W, *({"value": [x]} for x in _norms), lr=0.1)
    _add("mp_lamb_update_phase2", W, WIDE, *_wide_norms(*_norms), WIDE, dtypes=("float16",), lr=0.1)

V = {"shape": (5,)}
for _extra in ({}, {"rescale_grad": 0.5, "clip_gradient": 0.2}):
    _add("multi_sgd_update", W, W, V, V, lrs=(0.1, 0.3), wds=(0.0, 0.2), num_weights=2, **_extra)
    for _case in CASES[-2:]:
        _case["out"] = [0, 2]
    for _name, _own, _types in (
        ("multi_sgd_mom_update", lambda x, wide: (x, x, x), ("float32", "float64")),
        ("multi_mp_sgd_update", lambda x, wide: (x, x, wide), ("float16",)),
        ("multi_mp_sgd_mom_update", lambda x, wide: (x, x, wide, wide), ("float16",)),
        ("multi_sgd_update", lambda x, wide: (x, x), ("float32", "float64")),
    ):
        _each = [_own({"shape": x}, {"shape": x, "dtype": "float32"}) for x in ((3, 4), (5,))]
        _rates = {"lrs": (0.1, 0.3), "wds": (0.0, 0.2)}
        _loaded = [{"value": value, "dtype": "float32"} for value in _rates.values()]
        _more = {"num_weights": 2, **({"momentum": 0.9} if "mom" in _name else {}), **_extra}
        for _op, _last, _given in ((_name, (), _rates), (f"preloaded_{_name}", _loaded, {})):
            if _op == "multi_sgd_update":
                continue  # above
            _add(_op, *_each[0], *_each[1], *_last, dtypes=_types, **_given, **_more)
            for _case in CASES[-len(_types) :]:
                _case["out"] = [0, len(_each[0])]
                _case["name"] = f"{_op} {sorted(_extra)} {_case['inputs'][0]['dtype']}"
for _dtype in ("float16", "float32", "float64"):
    _add("multi_sum_sq", W, V, dtypes=[_dtype], num_arrays=2)
    _add("multi_all_finite", W, V, dtypes=[_dtype], num_arrays=2)
    _add("all_finite", W, dtypes=[_dtype])
for _k, _bad in enumerate((float("nan"), float("inf"), -float("inf"))):
    for _case in (
        {"op": "all_finite", "inputs": [{"value": [1.0, _bad]}], "params": {}},
        {"op": "multi_all_finite", "inputs": [V, {"value": [1.0, _bad]}], "params": {"num_arrays": 2}},
    ):
        CASES.append({**_case, "imperative": True, "name": f"{_case['op']} of a number that is not finite, {_k}"})

_RATES = ([0.1, 0.2, 0.3, 0.4], [4.0, 0.0, 9.0, 1e-12], [1.0, 2.0, 0.0, 5.0], [0.0, 0.1, 0.2, 0.3])
for _extra in ({}, {"rescale_grad": 0.25}):
    CASES.append({
        "op": "multi_lars", "imperative": True, "name": f"multi_lars {_extra}",
        "inputs": [{"value": value} for value in _RATES], "params": {"eta": 0.001, "eps": 1e-6, **_extra},
    })  # fmt: skip
