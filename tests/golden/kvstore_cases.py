"""Cases of key-value stores, as plain code over the API that MXNet 1.9.1 and weftplan share.

``run(mx)`` gets either package and returns ``{key: array}``. Every random number comes from NumPy's ``RandomState``.
"""

import numpy as np

DTYPES = ("float16", "float32", "float64", "int32", "int64", "uint8", "int8")
COMPRESSED = (((5,), 1, 0.5), ((17,), 2, 0.1), ((3, 7), 4, 0.3), ((33,), 5, 1.7))
"""Cases of compression as (shape, number of sources, threshold)."""


def exchanged(mx, kv, values):
    """Push one value from each context, and return the pulled sum."""
    kv.push("w", [mx.nd.array(value, ctx=mx.cpu(i), dtype=value.dtype) for i, value in enumerate(values)])
    out = mx.nd.zeros(values[0].shape, dtype=values[0].dtype)
    kv.pull("w", out=out)
    return out.asnumpy()


def sums(mx):
    """Yield (key, sum) of 1 to 10 sources in each store and dtype.

    The values differ in magnitude, so that the sums show each store's order of additions.
    """
    rng = np.random.RandomState(5)
    for kind in ("local", "device"):
        for dtype in DTYPES:
            for count in range(1, 11):
                if dtype.startswith("float"):
                    values = [rng.standard_normal(13) * 10.0 ** rng.randint(-3, 3, 13) for _ in range(count)]
                else:
                    values = [rng.randint(0, 127, 13) for _ in range(count)]
                kv = mx.kv.create(kind)
                kv.init("w", mx.nd.zeros((13,), dtype=dtype))
                yield f"sums/{kind}/{dtype}/{count}", exchanged(mx, kv, [value.astype(dtype) for value in values])


def compressed(mx):
    """Yield (key, sum) of four pushes to stores with two bits per element."""
    rng = np.random.RandomState(7)
    for number, (shape, count, threshold) in enumerate(COMPRESSED):
        kv = mx.kv.create("device")
        kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        kv.init("w", mx.nd.zeros(shape))
        for step in range(4):
            values = [(rng.standard_normal(shape) * threshold).astype("float32") for _ in range(count)]
            yield f"compressed/{number}/{step}", exchanged(mx, kv, values)


def run(mx):
    """Return all results by key."""
    return {**dict(sums(mx)), **dict(compressed(mx))}
