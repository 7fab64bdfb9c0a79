"""Golden cases of quantization and histograms."""

RANGES = [{"value": [-3.0]}, {"value": [5.0]}]
DATA = {"shape": (4, 33), "low": -3, "high": 5}
ABOVE = {"shape": (4, 33), "low": 0, "high": 5}
CODES = {"int8": [-127, -66, -1, 0, 1, 35, 127], "uint8": [0, 1, 66, 127, 128, 254, 255]}

CASES = [
    *(
        {"op": "_contrib_quantize", "params": {"out_type": kind}, "inputs": [DATA, *RANGES], "grad": False}
        for kind in ("int8", "uint8")
    ),
    *(
        {"op": "_contrib_quantize_v2", "params": params, "inputs": [data], "grad": False}
        for data, params in (
            (DATA, {}),
            (ABOVE, {"out_type": "uint8"}),
            (DATA, {"out_type": "auto", "min_calib_range": -2.0, "max_calib_range": 3.0}),
            (ABOVE, {"out_type": "auto", "min_calib_range": 0.0, "max_calib_range": 4.0}),
        )
    ),
    *(
        {
            "op": "_contrib_dequantize",
            "params": {"out_type": "float32"},
            "inputs": [{"value": codes, "dtype": kind}, *RANGES],
            "grad": False,
            "name": f"dequantize {kind}",
        }
        for kind, codes in CODES.items()
    ),
    {"op": "_histogram", "params": {"bin_cnt": 5, "range": (-3.0, 5.0)}, "inputs": [DATA], "grad": False},
    {"op": "_histogram", "inputs": [DATA, {"value": [-3.0, -1.0, 0.0, 5.0]}], "grad": False},
]
