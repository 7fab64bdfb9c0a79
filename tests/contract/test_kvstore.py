"""Contract of every single-process store: keys, values, order, errors and updaters."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weftplan as mx
from tests.contract.stores import STORES
from weftplan import device, engine, storage
from weftplan.errors import KVStoreError, OutOfMemoryError
from weftplan.storage import LimitResource, RawResource


def arrays(values, shape=(3, 4)):
    """Return one array per value, filled with it, each on its own CPU context."""
    return [mx.nd.full(shape, v, ctx=mx.cpu(i)) for i, v in enumerate(values)]


def test_init_push_pull(kv):
    """A pull returns the initial value, and later the sum of the last push, which replaces the stored value."""
    kv.init(3, mx.nd.ones((3, 4)))
    out = mx.nd.empty((3, 4))
    kv.pull(3, out=out)
    assert (out.asnumpy() == 1).all()
    kv.push(3, arrays([1, 2, 3]))
    kv.pull(3, out=out)
    assert (out.asnumpy() == 6).all()
    kv.push(3, mx.nd.full((3, 4), 5))
    kv.pull(3, out=out)
    assert (out.asnumpy() == 5).all()


def test_pull_to_every_device(kv):
    """A pull fills all arrays of a list on several contexts."""
    kv.init("w", mx.nd.full((2,), 7))
    outs = [mx.nd.zeros((2,), ctx=mx.cpu(i)) for i in range(4)]
    kv.pull("w", out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[7, 7]] * 4


def test_lists_of_keys(kv):
    """A list of keys takes a list of values, or of lists; the values of a repeated key are summed."""
    keys = [5, 2, 9]
    kv.init(keys, [mx.nd.zeros((2,))] * 3)
    kv.push(keys, [arrays([i, 1], (2,)) for i in range(3)])
    outs = [mx.nd.empty((2,)) for _ in keys]
    kv.pull(keys, out=outs)
    assert [out.asnumpy()[0] for out in outs] == [1, 2, 3]
    kv.push([5, 5], arrays([10, 20], (2,)))
    kv.pull(5, out=outs[0])
    assert outs[0].asnumpy()[0] == 30


def test_pushpull_and_broadcast(kv):
    """``pushpull`` writes the sum to ``out``, or without it to the values; ``broadcast`` is init and pull."""
    outs = arrays([0, 0])
    kv.broadcast("w", mx.nd.full((3, 4), 2), outs)
    assert all((out.asnumpy() == 2).all() for out in outs)
    values = arrays([1, 2])
    kv.pushpull("w", values, out=outs)
    assert all((out.asnumpy() == 3).all() for out in outs)
    kv.pushpull("w", values)
    assert all((value.asnumpy() == 3).all() for value in values)


@pytest.mark.parametrize("keys", ["w", ["w", "v"]], ids=["one key", "two keys"])
def test_bad_out_leaves_nothing_half_done(kv, keys):
    """If an out has the wrong shape, dtype or number, ``broadcast`` creates no key and ``pushpull`` pushes nothing."""
    several = isinstance(keys, list)
    good, bad = mx.nd.ones((3,)), mx.nd.ones((4,))
    for out in (bad, [good, bad], mx.nd.ones((3,), dtype="float64"), [], None):
        with pytest.raises(KVStoreError, match=r"out|broadcast"):
            kv.broadcast(keys, [good, good] if several else good, [good, out] if several else out)
    assert kv.statistics()["keys"] == 0
    kv.broadcast(keys, [good, good] if several else good, [good, good] if several else good)
    called = []
    kv.set_updater(lambda key, merged, stored: called.append(key))
    for out in (bad, [good, bad], []):
        with pytest.raises(KVStoreError, match=r"out|pushpull"):
            kv.pushpull(keys, [good, good] if several else good, out=[good, out] if several else out)
    assert called == []


def test_the_store_does_not_alias_pushed_arrays(kv):
    """A change of a gradient after its push does not change the pulled value."""
    kv.init(0, mx.nd.zeros((2,)))
    gradient = mx.nd.ones((2,))
    kv.push(0, gradient)
    gradient[:] = 99
    out = mx.nd.empty((2,))
    kv.pull(0, out=out)
    assert out.asnumpy().tolist() == [1, 1]


def test_more_sources_than_before(kv):
    """A later push may have more or fewer source devices than an earlier one."""
    kv.init(0, mx.nd.zeros((3, 4)))
    out = mx.nd.empty((3, 4))
    for count in (1, 2, 5, 3):
        kv.push(0, arrays(range(1, count + 1)))
        kv.pull(0, out=out)
        assert (out.asnumpy() == count * (count + 1) / 2).all()


def test_updater_sees_sum_and_changes_stored(kv):
    """An updater gets the user's key, the sum and the stored array, which it may change."""
    seen = []

    def update(key, merged, stored):
        seen.append(key)
        stored += merged * 2

    kv.init("a", mx.nd.ones((3, 4)))
    kv.set_updater(update)
    kv.push("a", arrays([1, 2]))
    kv.push("a", arrays([1, 2]))
    out = mx.nd.empty((3, 4))
    kv.pull("a", out=out)
    assert (out.asnumpy() == 13).all()
    assert seen == ["a", "a"]


def test_updater_that_raises_reaches_the_caller(kv):
    """A push raises the exception of its updater, and the stored value is unchanged."""
    kv.init(0, mx.nd.ones((2,)))

    def bad(key, merged, stored):
        raise ZeroDivisionError("updater")

    kv.set_updater(bad)
    with pytest.raises(ZeroDivisionError, match="updater"):
        kv.push(0, mx.nd.ones((2,)))
    kv.set_updater(None)
    out = mx.nd.empty((2,))
    kv.pull(0, out=out)
    assert out.asnumpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.pull("nope", out=mx.nd.empty((2,))), r"key 'nope' doesn't exist. Did you init\?"),
        (lambda kv: kv.push("nope", mx.nd.empty((2,))), "doesn't exist"),
        (lambda kv: kv.init("a", mx.nd.empty((2,))), "initialised already"),
        (lambda kv: kv.init(1, mx.nd.empty((2,))), "Mixed key types are not allowed"),
        (lambda kv: kv.push("a", mx.nd.empty((3,))), r"holds \(2,\) float32, got \(3,\) float32"),
        (lambda kv: kv.push("a", mx.nd.empty((2,), dtype="float64")), "float64"),
        (lambda kv: kv.pull("a"), "needs out="),
        (lambda kv: kv.push(1.5, mx.nd.empty((2,))), "int or a str"),
        (lambda kv: kv.push(["a", "b"], [mx.nd.empty((2,))]), "2 keys need a list of 2"),
        (lambda kv: kv.pull(["a", "b"], out=[mx.nd.empty((2,))]), "2 keys need a list of 2 items as out, got 1"),
        (lambda kv: kv.pull("a", out=[mx.nd.empty((2,)), mx.nd.empty((3,))]), r"got \(3,\) float32 on \w+\(0\)"),
        (lambda kv: kv.pull("a", out=mx.nd.empty((2,), dtype="float16")), "holds .* float32, got .* float16"),
        (lambda kv: kv.push("a", 3), "must be an NDArray"),
        (lambda kv: kv.push("a", []), "empty list"),
        (lambda kv: kv.set_updater(3), "callable"),
        (lambda kv: kv.save_optimizer_states("x"), "no optimizer"),
        (lambda kv: kv.is_capable("flying"), "unknown capability"),
        (lambda kv: kv.is_capable(3), "unknown capability 3"),
    ],
)
def test_bad_input(kv, call, message):
    """Each misuse raises KVStoreError with a message that names it, and the stored value is unchanged."""
    kv.init("a", mx.nd.ones((2,)))
    with pytest.raises(KVStoreError, match=message):
        call(kv)
    out = mx.nd.empty((2,))
    kv.pull("a", out=out)
    assert out.asnumpy().tolist() == [1, 1]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["local", "device"]),
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(-9, 9), min_size=1, max_size=5)), max_size=12),
)
def test_against_a_dictionary(kind, program):
    """After any sequence of pushes, each key has the sum of its last push, as in a dictionary."""
    kv = mx.kv.create(kind)
    model = dict.fromkeys("abc", 0)
    kv.init(list("abc"), [mx.nd.zeros((2,))] * 3)
    for key, values in program:
        kv.push(key, arrays(values, (2,)))
        model[key] = sum(values)
    for key, want in model.items():
        out = mx.nd.empty((2,))
        kv.pull(key, out=out)
        assert out.asnumpy().tolist() == [want, want]


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.shows("MXNET_KVSTORE_REDUCTION_NTHREADS", "MXNET_KVSTORE_BIGARRAY_BOUND")
def test_same_bits_with_any_number_of_reduction_threads(kind, monkeypatch):
    """Summing large arrays with four threads gives the same bits as with one."""
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(300_000).astype("float32") for _ in range(4)]
    results = []
    for threads in ("1", "4"):
        monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", threads)
        monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "1000")
        kv = mx.kv.create(kind)
        kv.init(0, mx.nd.zeros((300_000,)))
        kv.push(0, [mx.nd.array(v, ctx=mx.cpu(i)) for i, v in enumerate(values)])
        out = mx.nd.empty((300_000,))
        kv.pull(0, out=out)
        results.append(out.asnumpy())
    assert np.array_equal(*results)


@pytest.mark.parametrize("engine_kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("kind", STORES)
def test_push_then_pull_needs_no_barrier(kind, engine_kind):
    """Fifty rounds of push, update and pull, read only at the end, equal the serial sum."""
    with engine.using(engine.create(engine_kind)) as chosen:
        kv = mx.kv.create(kind)
        kv.init("w", mx.nd.zeros((5,)))
        kv.set_optimizer(mx.optimizer.create("test", rescale_grad=0.5))
        grads, weights = arrays([0, 0], (5,)), arrays([0, 0], (5,))
        for step in range(50):
            for grad in grads:
                grad[:] = step
            kv.push("w", grads, priority=-step)
            kv.pull("w", out=weights, priority=-step)
        assert [w.asnumpy().tolist() for w in weights] == [[float(sum(range(50)))] * 5] * 2
        chosen.wait_for_all()
    chosen.stop()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8"])
def test_dtypes(kv, dtype):
    """The sum has the dtype of the key."""
    kv.init(0, mx.nd.zeros((4,), dtype=dtype))
    kv.push(0, [mx.nd.full((4,), v, ctx=mx.cpu(i), dtype=dtype) for i, v in enumerate((1, 2, 3))])
    out = mx.nd.empty((4,), dtype=dtype)
    kv.pull(0, out=out)
    assert out.np_dtype == dtype
    assert out.asnumpy().tolist() == [6] * 4


@pytest.mark.parametrize("place", [mx.cpu, mx.sim])
def test_overflowing_sums_are_silent(kv, place):
    """Overflowing sums give inf and nan without a warning, on every device and thread."""
    kv.init(0, mx.nd.zeros((3,), dtype="float16"))
    values = [[6e4, np.inf, np.nan], [6e4, -np.inf, 1], [1, 1, 1]]
    kv.push(0, [mx.nd.array(value, ctx=place(i), dtype="float16") for i, value in enumerate(values)])
    out = mx.nd.empty((3,), dtype="float16")
    kv.pull(0, out=out)
    np.testing.assert_array_equal(out.asnumpy(), np.float16([np.inf, np.nan, np.nan]))


def test_properties_of_a_single_process_store(kv):
    """A single-process store has rank 0, one worker, no barrier, its own optimizer and the requested type name."""
    assert (kv.rank, kv.num_workers, kv.barrier(), kv._barrier()) == (0, 1, None, None)
    assert kv.is_capable("optimizer") is kv.is_capable(kv.OPTIMIZER.upper()) is True
    assert mx.kv.create(kv.type.upper()).type == kv.type
    assert type(mx.kv.create(kv.type)) is type(kv)


def test_one_array_pushed_twice_counts_twice(kv):
    """An array that occurs three times in a push is added three times."""
    one = mx.nd.ones((3,))
    kv.init(0, mx.nd.zeros((3,)))
    kv.push(0, [one, one, one])
    out = mx.nd.empty((3,))
    kv.pull(0, out=out)
    assert out.asnumpy().tolist() == [3, 3, 3]


def test_empty_arrays(kv):
    """A key may have arrays without elements."""
    kv.init(0, mx.nd.zeros((0, 3)))
    kv.push(0, [mx.nd.zeros((0, 3))] * 2)
    out = mx.nd.empty((0, 3))
    kv.pull(0, out=out)
    assert out.asnumpy().shape == (0, 3)


def test_failed_gradient_fails_the_pull_until_healed(kv):
    """A pull after the push of a failed gradient raises its error; after a successful push it succeeds."""
    bad = mx.nd.ones((3,))

    def broken():
        raise RuntimeError("no gradient today")

    kv.init("w", mx.nd.zeros((3,)))
    out = mx.nd.zeros((3,))

    def use_it():
        engine.get().push(broken, [], [bad.var], mx.cpu(), name="broken gradient")
        assert engine.get().kind != "NaiveEngine"  # there the push raises, on other engines the read
        kv.push("w", [bad, mx.nd.ones((3,))])
        kv.pull("w", out=out)
        out.asnumpy()

    with pytest.raises(RuntimeError, match="no gradient today"):
        use_it()
    kv.push("w", [mx.nd.ones((3,)), mx.nd.ones((3,))])
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [2, 2, 2]


def test_bad_calls_leave_a_store_unchanged(kv):
    """A call that fails creates no key and does not determine the type of keys."""
    for call in (
        lambda: kv.push(3, mx.nd.ones((2,))),
        lambda: kv.pull("zz", out=mx.nd.ones((2,))),
        lambda: kv.init([1, "a"], [mx.nd.ones((2,))] * 2),
        lambda: kv.init(["a", "a"], [mx.nd.ones((2,))] * 2),
        lambda: kv.init(["a", "b"], [mx.nd.ones((2,)), 3]),
    ):
        with pytest.raises(KVStoreError):
            call()
    assert kv.statistics()["keys"] == 0
    kv.init("w", mx.nd.ones((2,)))


def test_replace_bypasses_the_updater(kv):
    """``replace`` stores new weights without the updater and ignores an unknown key.

    Weights of another shape raise KVStoreError.
    """
    kv.init("w", mx.nd.zeros((2,)))
    kv.set_optimizer(mx.optimizer.create("test"))
    kv.replace("w", mx.nd.full((2,), 9))
    kv.replace("other", mx.nd.full((2,), 9))
    out = mx.nd.zeros((2,))
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [9, 9]
    with pytest.raises(KVStoreError, match=r"replace: key 'w' holds \(2,\) float32, got \(3,\)"):
        kv.replace("w", mx.nd.zeros((3,)))


def test_set_optimizer_wants_an_optimizer(kv):
    """``set_optimizer`` raises KVStoreError for the name of an optimizer."""
    with pytest.raises(KVStoreError, match=r"needs an optimizer such as mx.optimizer.create\(.* got 'sgd'"):
        kv.set_optimizer("sgd")


def test_threads_may_push_different_keys(kv):
    """Eight threads that push and pull a key each always read the sum of their own values."""
    if engine.get().kind == "Simulator":
        pytest.skip("one thread drives the simulator")
    kv.init(list(range(8)), [mx.nd.zeros((64,))] * 8)
    failures = []

    def work(key):
        try:
            out = mx.nd.empty((64,))
            for round_number in range(20):
                kv.push(key, [mx.nd.full((64,), key), mx.nd.full((64,), round_number)])
                kv.pull(key, out=out)
                assert out.asnumpy().tolist() == [key + round_number] * 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_failed_init_creates_no_key(kv):
    """If memory fails for the second of two keys, neither is created, and the type of keys is still open."""
    small, large = mx.nd.ones((4,)), mx.nd.ones((4000,))
    mx.nd.waitall()
    with storage.using(LimitResource(RawResource(device.get(mx.cpu())), 1000)):
        with pytest.raises(OutOfMemoryError):
            kv.init(["a", "b"], [small, large])
        assert kv.statistics()["keys"] == 0
        kv.init(0, small)


def test_threads_may_push_one_key(kv):
    """Each of 200 pushes of four threads to one key reaches the optimizer once, with its own sum."""
    kv.init("w", mx.nd.zeros((3,)))
    kv.set_optimizer(mx.optimizer.create("test"))

    def work(number):
        gradient = mx.nd.full((3,), 10.0**number, ctx=mx.cpu(number))
        for _ in range(50):
            kv.push("w", [gradient, gradient])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    out = mx.nd.empty((3,))
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [111100.0] * 3
