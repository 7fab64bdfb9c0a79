"""Gradient compression to one or two bits an element: the rule, its use by stores, and refused settings."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import KVStoreError
from weftplan.kvstore import compression
from weftplan.kvstore.compression import Compression
from weftplan.support import slots

KINDS = ["device", "local_allreduce_device"]


def compress_slowly(gradient: np.ndarray, residual: list[np.float32], threshold: np.float32) -> list[np.float32]:
    """Return the values that 2-bit compression of a flat gradient sends, and change ``residual`` in place."""
    sent = []
    for place, value in enumerate(gradient):
        residual[place] = np.float32(residual[place] + value)
        sign = int(residual[place] >= threshold) - int(residual[place] <= -threshold)
        residual[place] = np.float32(residual[place] - np.float32(sign) * threshold)
        sent.append(np.float32(sign) * threshold)
    return sent


def push_and_pull(kv: mx.kv.KVStore, gradients: list[np.ndarray], contexts: list[mx.Context]) -> np.ndarray:
    """Push one gradient for each context, and return the pulled sum."""
    kv.push("w", [mx.nd.array(g, ctx=ctx) for g, ctx in zip(gradients, contexts, strict=True)])
    out = mx.nd.empty(gradients[0].shape)
    kv.pull("w", out=out)
    return out.asnumpy()


def make_store(shape: tuple[int, ...], threshold: float, kind: str = "device") -> mx.kv.KVStore:
    """Return a store with 2-bit compression and the key ``w``, an array of zeros."""
    kv = mx.kv.create(kind)
    kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
    kv.init("w", mx.nd.zeros(shape))
    return kv


@pytest.mark.parametrize("where", [mx.cpu, mx.sim, mx.cpu_pinned])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "count", "threshold"), [((7,), 1, 0.5), ((3, 5), 3, 0.1), ((4, 4), 6, 1.7)])
def test_the_rule_element_by_element(kind, where, shape, count, threshold):
    """Compressed pushes have the bits of the element-by-element rule, with a separate residual for each source."""
    rng = np.random.default_rng(count)
    kv = make_store(shape, threshold, kind)
    residuals = [[np.float32(0)] * int(np.prod(shape)) for _ in range(count)]
    t = np.float32(threshold)
    for _ in range(5):
        gradients = [(rng.standard_normal(shape) * threshold).astype(np.float32) for _ in range(count)]
        want = np.zeros(int(np.prod(shape)), np.float32)
        for number, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True)):
            sent = np.array(compress_slowly(gradient.ravel(), residual, t))
            want = sent if number == 0 else want + sent
        got = push_and_pull(kv, gradients, [where(i) for i in range(count)])
        np.testing.assert_array_equal(got, want.reshape(shape))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 65, 100])
def test_blocks_do_not_show(size, monkeypatch):
    """Packed bytes and sums are those of the element-by-element rule, for sizes around byte and block boundaries."""
    monkeypatch.setattr(compression, "_BLOCK", 16)
    rng, rule = np.random.default_rng(size), Compression(0.25)
    gradient, slow = rng.standard_normal(size).astype(np.float32), [np.float32(0)] * size
    residual, packed = np.zeros(size, np.float32), np.full(rule.packed_size(size), 0x55, np.uint8)
    rule.pack(gradient, residual, packed)
    want = compress_slowly(gradient, slow, np.float32(0.25))
    code = {0.25: "11", -0.25: "10", 0.0: "00"}
    bits = "".join(code[float(value)] for value in want) + "00" * (-size % 4)
    assert packed.tolist() == [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
    assert residual.tolist() == slow
    out = np.full(size, np.nan, np.float32)
    rule.unpack_sum([packed, packed, packed], out)
    np.testing.assert_array_equal(out, np.array(want, np.float32) * 3)


def test_exactly_the_threshold_is_sent():
    """A value equal to plus or minus the threshold is sent; a slightly smaller value stays in the residual."""
    kv = make_store((4,), 0.5)
    less = np.nextafter(np.float32(0.5), np.float32(0))
    assert push_and_pull(kv, [np.float32([0.5, -0.5, less, -less])], [mx.cpu(0)]).tolist() == [0.5, -0.5, 0, 0]
    assert push_and_pull(kv, [np.float32([less, -less, 0, 0])], [mx.cpu(0)]).tolist() == [0, 0, 0, 0]
    tiny = np.float32(1e-7)
    assert push_and_pull(kv, [np.float32([tiny, -tiny, tiny, -tiny])], [mx.cpu(0)]).tolist() == [0.5, -0.5, 0.5, -0.5]


def test_with_an_updater_and_other_keys():
    """The updater receives the compressed sum, and each key has its own residuals."""
    kv = make_store((2,), 0.5)
    kv.init("v", mx.nd.ones((2,)))
    kv.set_updater(lambda key, sent, stored: stored.__iadd__(sent))
    for key in ("w", "v", "w"):
        kv.push(key, [mx.nd.array([0.3, -0.6]), mx.nd.array([0.6, 0.0], ctx=mx.cpu(1))])
    outs = [mx.nd.empty((2,)), mx.nd.empty((2,))]
    kv.pull(["w", "v"], out=outs)
    assert [out.tolist() for out in outs] == [[1.5, -1.0], [1.5, 0.5]]


def test_a_source_that_moves_keeps_its_residual():
    """A residual belongs to a position in the list of gradients, not to a device; the list may grow or shrink."""
    kv = make_store((1,), 0.5)
    assert push_and_pull(kv, [np.float32([0.3])], [mx.cpu(0)]).tolist() == [0.0]
    before = kv.residuals.codes["w", 0]
    assert push_and_pull(kv, [np.float32([0.0])], [mx.cpu(0)]).tolist() == [0.0]
    assert kv.residuals.codes["w", 0] is before, "buffers are reused while the device stays the same"
    assert push_and_pull(kv, [np.float32([0.3])], [mx.sim(0)]).tolist() == [0.5]
    assert kv.residuals.arrays["w", 0].context == kv.residuals.codes["w", 0].context == mx.sim(0)
    assert push_and_pull(kv, [np.float32([0.4]), np.float32([0.7])], [mx.cpu(1), mx.sim(1)]).tolist() == [1.0]
    assert push_and_pull(kv, [np.float32([0.5])], [mx.cpu(0)]).tolist() == [0.5]


def test_switched_on_after_pushes():
    """Compression that is set after a push applies to the next push, and frees staging copies of whole gradients."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((8,)))
    contexts = [mx.sim(0), mx.sim(1)]
    gradients = [np.full(8, 0.3, np.float32)] * 2
    np.testing.assert_array_equal(push_and_pull(kv, gradients, contexts), gradients[0] * 2)
    assert kv.statistics()["staging_bytes"] == 32
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.25})
    np.testing.assert_array_equal(push_and_pull(kv, gradients, contexts), np.full(8, 0.5, np.float32))
    assert kv.statistics()["staging_bytes"] == 2
    assert kv.statistics()["compression_bytes"] == 2 * (32 + 2)
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.05})
    np.testing.assert_array_equal(push_and_pull(kv, gradients, contexts), np.full(8, np.float32(0.05) * 2))


@pytest.mark.parametrize("where", [[mx.cpu(0), mx.cpu(1)], [mx.sim(0), mx.sim(1)]])
@pytest.mark.parametrize(("first", "second"), [("1bit", "2bit"), ("2bit", "1bit")])
def test_another_kind_after_pushes(first, second, where):
    """After a change of the compression type residuals continue, and buffers have the planned sizes of the new type."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((21,), ctx=where[0]))
    gradient = np.linspace(-3, 3, 21, dtype=np.float32)
    for kind in (first, second):
        kv.set_gradient_compression({"type": kind, "threshold": 0.5})
        actual = push_and_pull(kv, [gradient] * 2, where)
    codec, residual = Compression(0.5, first), np.zeros(21, np.float32)
    for kind in (first, second):
        codec = Compression(0.5, kind)
        packed, sent = np.empty(codec.packed_size(21), np.uint8), np.empty(21, np.float32)
        codec.pack(gradient, residual, packed)
        codec.unpack_sum([packed] * 2, sent)
    np.testing.assert_array_equal(actual, sent)
    planned = kv.buffer_bytes([(21, 84)], where, updates=False)
    kept = kv.statistics()
    assert {name: kept[f"{name}_bytes"] for name in planned} == planned


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"type": "none"}, "must have the type '2bit'"),
        ({"type": "4bit"}, "must have the type '2bit'"),
        ({}, "must have the type '2bit'"),
        ({"threshold": 0.5}, "must have the type '2bit'"),
        ("2bit", "must be a dictionary such as"),
        (None, "must be a dictionary such as"),
        ({"type": "2bit", "treshold": 0.5}, r"unknown entries \['treshold'\]"),
        ({"type": "2bit", "threshold": 0}, "finite number above 0, got 0"),
        ({"type": "2bit", "threshold": -1}, "finite number above 0, got -1"),
        ({"type": "2bit", "threshold": float("nan")}, "finite number above 0, got nan"),
        ({"type": "2bit", "threshold": float("inf")}, "finite number above 0, got inf"),
        ({"type": "2bit", "threshold": 1e-60}, "finite number above 0, got 1e-60"),
        ({"type": "2bit", "threshold": "much"}, "finite number above 0, got 'much'"),
        ({"type": "2bit", "threshold": None}, "finite number above 0, got None"),
    ],
)
def test_bad_settings(params, message):
    """Invalid compression settings raise an error that names the problem, and compression stays off."""
    kv = mx.kv.create("device")
    with pytest.raises(KVStoreError, match=message):
        kv.set_gradient_compression(params)
    kv.init("w", mx.nd.zeros((1,)))
    assert push_and_pull(kv, [np.float32([0.125])], [mx.cpu(0)]).tolist() == [0.125]


def test_not_for_a_store_that_sums_on_the_host():
    """A store ``local`` refuses gradient compression, as in MXNet."""
    with pytest.raises(KVStoreError, match="not for a store 'local'"):
        mx.kv.create("local").set_gradient_compression({"type": "2bit"})


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_other_dtypes_are_refused(dtype):
    """A push of a dtype other than float32 raises an error that names its key before any key of the list is pushed."""
    kv = make_store((2,), 0.5)
    kv.init("other", mx.nd.ones((2,), dtype=dtype))
    with pytest.raises(KVStoreError, match=rf"key 'other' holds {dtype}; .* takes float32 only"):
        kv.push(["w", "other"], [mx.nd.ones((2,)), mx.nd.ones((2,), dtype=dtype)])
    outs = [mx.nd.zeros((2,)), mx.nd.zeros((2,), dtype=dtype)]
    kv.pull(["w", "other"], out=outs)
    assert [out.tolist() for out in outs] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17, 100])
def test_one_bit_element_by_element(size, monkeypatch):
    """Packed bytes, residuals and sums of ``1bit`` are those of MXNet 2.0's rule over four pushes."""
    monkeypatch.setattr(compression, "_BLOCK", 16)
    rng, rule = np.random.default_rng(size), Compression.from_params({"type": "1bit", "threshold": 0.25})
    residual, slow = np.zeros(size, np.float32), np.zeros(size, np.float32)
    packed = np.full(rule.packed_size(size), 0x55, np.uint8)
    assert len(packed) == -(-size // 8)
    for _ in range(4):
        gradient = rng.standard_normal(size).astype(np.float32)
        rule.pack(gradient, residual, packed)
        sent = []
        for place in range(size):
            slow[place] += gradient[place]
            sent.append(1 if slow[place] > np.float32(0.25) else -1)
            slow[place] -= sent[-1]
        bits = "".join("1" if one == 1 else "0" for one in sent) + "0" * (-size % 8)
        assert packed.tolist() == [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
        assert residual.tolist() == slow.tolist()
        out = np.full(size, np.nan, np.float32)
        rule.unpack_sum([packed, packed], out)
        np.testing.assert_array_equal(out, 2 * np.array(sent, np.float32))


def test_a_store_sends_one_bit():
    """A store with ``1bit`` sends 1 for a value above the threshold, else -1, and adds the rest to the next push."""
    kv = mx.kv.create("device")
    kv.set_gradient_compression({"type": "1bit", "threshold": 0.1})
    kv.init("w", mx.nd.zeros((3,)))
    assert push_and_pull(kv, [np.array([0.3, 0.1, -5], np.float32)], [mx.cpu(0)]).tolist() == [1, -1, -1]
    assert push_and_pull(kv, [np.array([0.9, 0.1, 5], np.float32)], [mx.cpu(0)]).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["2bit", "1bit"])
@pytest.mark.parametrize("size", [65_537, 65_536 + 16, 200_003])
def test_compiled_loops_have_the_bits_of_numpy(kind, size):
    """Compiled loops on one and three threads give NumPy's packed bytes, residuals and sums, bit for bit.

    Values include zeros of both signs, infinities and NaN; sizes end within a byte and within a step of the loop.
    """
    rule = Compression(0.5, kind)
    gradient = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    gradient[:6] = 0.5, -0.5, 0.0, -0.0, np.nan, np.inf
    gradient[-4:] = -np.inf, 0.5, -0.5, -0.0
    ways = [{"compiled": False}, {"threads": 1}, {"threads": 3}]
    residuals = [np.full(size, -0.0, np.float32) for _ in ways]
    for step in range(3):
        packed = [np.full(rule.packed_size(size), 255, np.uint8) for _ in ways]
        sums = [np.full(size, 7, np.float32) for _ in ways]
        for way, residual, codes, total in zip(ways, residuals, packed, sums, strict=True):
            with np.errstate(all="ignore"):
                rule.pack(gradient, residual, codes, **way)
            rule.unpack_sum([codes, packed[0], codes], total, **way)
        for residual, codes, total in zip(residuals, packed, sums, strict=True):
            np.testing.assert_array_equal(codes, packed[0], err_msg=f"step {step}")
            np.testing.assert_array_equal(total.view(np.uint32), sums[0].view(np.uint32))
            numbers = ~np.isnan(residuals[0])
            np.testing.assert_array_equal(residual.view(np.uint32)[numbers], residuals[0].view(np.uint32)[numbers])
            np.testing.assert_array_equal(np.isnan(residual), ~numbers)


def test_a_large_gradient_takes_the_compiled_loop(monkeypatch):
    """A store packs a large gradient by the compiled loop, or by NumPy if ``WEFTPLAN_KERNELS=numpy``."""
    pytest.importorskip("llvmlite")
    taken = []
    result = slots.COMPILED_PACK.get()
    monkeypatch.setattr(slots.COMPILED_PACK, "value", lambda *args: taken.append(1) or result(*args))
    for kernels, count in (("auto", 1), ("numpy", 0)):
        monkeypatch.setenv("WEFTPLAN_KERNELS", kernels)
        taken.clear()
        kv = make_store((100_000,), 0.5)
        actual = push_and_pull(kv, [np.full(100_000, 0.75, np.float32)], [mx.cpu(0)])
        assert (actual == 0.5).all()
        assert len(taken) == count
