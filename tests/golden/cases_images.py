"""Golden cases of the image operators (pure data)."""

CASES = []


def _add(op, *inputs, **more):
    CASES.append({"op": op, "inputs": list(inputs), **more})


_PIXELS = {"low": 0.0, "high": 255.0}
for _shape in ((3, 4, 5), (2, 3, 4, 5)):
    _add("_image_normalize", _shape, params={"mean": (0.5, 1.0, 2.0), "std": (3.0, 2.0, 0.5)})
    _add("_image_normalize", _shape, params={"mean": (0.5,), "std": (2.0,)})
_add("_image_normalize", (1, 4, 5), params={"mean": (0.25,), "std": (2.0,)})
for _shape in ((4, 5, 3), (2, 4, 5, 3), (4, 5, 1)):
    _add("_image_to_tensor", {"shape": _shape, "dtype": "uint8", **_PIXELS}, grad=False)
    _add("_image_to_tensor", {"shape": _shape, **_PIXELS}, grad=False, name=f"to_tensor of floats {_shape}")
for _shape in ((4, 5, 3), (2, 4, 5, 3)):
    _add("_image_crop", _shape, params={"x": 1, "y": 2, "width": 3, "height": 2})
    _add("_image_crop", _shape, params={"x": 0, "y": 0, "width": 5, "height": 4})
# MXNet 1.9.1 does not write the middle row or column of an odd number, so all numbers are even.
for _name in ("_image_flip_left_right", "_image_flip_top_bottom"):
    _add(_name, (4, 6, 3), grad=False)
    _add(_name, {"shape": (4, 6, 3), "dtype": "uint8", **_PIXELS}, grad=False, name=f"{_name} of bytes")
