"""Golden cases of operators that sample images at grid points or in regions of interest."""

CASES = []


def _add(op, *inputs, **kwargs):
    CASES.append({"op": op, "inputs": list(inputs), **kwargs})


WIDE = {"low": -1.3, "high": 1.3}
for _shape in ((2, 6), (1, 6)):
    _add("GridGenerator", _shape, params={"transform_type": "affine", "target_shape": (3, 4)})
_add("GridGenerator", (2, 2, 3, 4), params={"transform_type": "warp"})
for _dtype in ("float32", "float64"):
    _add(
        "BilinearSampler",
        {"shape": (2, 3, 4, 5), "dtype": _dtype},
        {"shape": (2, 2, 3, 6), "dtype": _dtype, **WIDE},
    )
_add("BilinearSampler", (1, 2, 5, 4), {"value": [[[[-1.0, 1.0, 0.0]], [[-1.0, 1.0, 5.0]]]]})
_add(
    "SpatialTransformer",
    (2, 3, 5, 6),
    {"shape": (2, 6), **WIDE},
    params={"target_shape": (3, 4), "transform_type": "affine", "sampler_type": "bilinear"},
)
_add(
    "SpatialTransformer",
    (1, 1, 4, 4),
    {"value": [[0.9, 0.1, 0.05, -0.1, 0.8, 0.0]]},
    params={"target_shape": (6, 5), "transform_type": "affine", "sampler_type": "bilinear"},
)

REGIONS = {"value": [[0, 0, 0, 8, 8], [1, 2.5, 1, 9, 3], [1, 3, 5, 1, 1], [0, 20, 20, 30, 30], [-1, 0, 0, 4, 4]]}
for _size, _scale in (((2, 2), 0.5), ((3, 2), 1.0), ((1, 4), 0.3), ((7, 7), 0.7)):
    _add("ROIPooling", (2, 3, 5, 6), REGIONS, params={"pooled_size": _size, "spatial_scale": _scale})
