"""Spilled arrays: values, limits, choice of the array to spill, and full offload targets."""

import threading

import numpy as np
import pytest

import weftplan as mx
from tests.support.waiting import settled
from weftplan import config, device, storage
from weftplan.device.file_device import FileDevice
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.ndarray.spill import spilling
from weftplan.storage import LimitResource, NaivePool
from weftplan.storage.offload import traffic, waiting_bytes
from weftplan.support import slots

KIB = 1 << 10
SIZE = 16 * KIB
"""Bytes of an array in this file."""


def make_arrays(ctx, count):
    """Return ``count`` arrays of SIZE bytes, each filled with its number."""
    return [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(count)]


@pytest.mark.parametrize(
    ("ctx", "targets"),
    [
        (mx.cpu(9160), "file:/any:32MB"),
        (mx.sim(60), "host:32MB"),
        (mx.sim(61), "file:/any"),
        (mx.sim(62), "peer"),
        (mx.sim(63), "host:64KiB,file:/any:32MB"),
    ],
    ids=str,
)
def test_four_times_the_memory_keeps_values(ctx, targets, folder):
    """32 arrays in memory for eight have the right values; the limit holds, and no array stays offloaded at the end."""
    if targets == "peer":
        storage.get(mx.sim(64))
    targets = targets.replace("/any", str(folder))
    before, began = waiting_bytes(), traffic.outs
    with spilling.using(targets), storage.using(LimitResource(NaivePool(device.get(ctx)), 8 * SIZE)) as pool:
        xs = make_arrays(ctx, 32)
        ys = [x + 1 for x in xs]
        for value, (x, y) in enumerate(zip(xs, ys, strict=True)):
            assert (y.asnumpy() == value + 1).all()
            assert (x.asnumpy() == value).all()
        total = mx.nd.zeros((SIZE // 4,), ctx=ctx)
        for x in xs:
            total += x
        assert (total.asnumpy() == sum(range(32))).all()
        assert traffic.outs > began + 32
        assert waiting_bytes() > before
        assert pool.statistics().peak_requested_bytes <= 8 * SIZE
        del x, y, xs, ys, total
        settled()
        assert pool.statistics().live == 0
    assert waiting_bytes() == before


def test_least_recently_used_array_is_spilled(folder):
    """Of three arrays with memory for two, the least recently used is spilled."""
    ctx = mx.cpu(9165)
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 2 * SIZE)):
        a, b = make_arrays(ctx, 2)
        a.asnumpy()
        c = mx.nd.array(np.zeros(SIZE // 4, "float32"), ctx=ctx)
        assert [one.chunk.is_offloaded for one in (a, b, c)] == [False, True, False]
        b.asnumpy()
        assert [one.chunk.is_offloaded for one in (a, b, c)] == [True, False, False]
        del a, b, c
        settled()


def test_memory_with_views_is_not_spilled(folder):
    """An array with a NumPy view, or with a part used by another array, is not spilled."""
    ctx = mx.cpu(9166)
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 2 * SIZE)):
        a, b = make_arrays(ctx, 2)
        view = np.from_dlpack(a)
        part = b.chunk.part(0, 100)
        with pytest.raises(OutOfMemoryError):
            mx.nd.array(np.zeros(SIZE // 4, "float32"), ctx=ctx)
        assert not a.chunk.is_offloaded
        assert not b.chunk.is_offloaded
        a[:] = 9
        a.wait_to_read()
        assert (view == 9).all()
        del view, part
        settled()
        c = mx.nd.array(np.zeros(SIZE // 4, "float32"), ctx=ctx)
        assert a.chunk.is_offloaded or b.chunk.is_offloaded
        assert (a.asnumpy() == 9).all()
        del a, b, c
        settled()


def test_report_explains_full_homes(folder, monkeypatch):
    """If the offload target is full, OutOfMemoryError gives the reason, and arrays in memory are unchanged.

    After an array is freed, the next request succeeds.
    """
    ctx = mx.cpu(9167)

    def full(*_):
        raise OutOfMemoryError("No space left on device")

    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 2 * SIZE)):
        a, b = make_arrays(ctx, 2)
        monkeypatch.setattr(FileDevice, "allocate", full)
        with pytest.raises(OutOfMemoryError, match=r"WEFTPLAN_SPILL\): .*No space left on device"):
            mx.nd.array(np.zeros(SIZE // 4, "float32"), ctx=ctx)
        assert (a.asnumpy() == 0).all()
        assert (b.asnumpy() == 1).all()
        del a
        settled()
        c = mx.nd.array(np.zeros(SIZE // 4, "float32"), ctx=ctx)
        del b, c
        settled()


def test_limit_of_a_home_is_respected():
    """If the host's limit for offloaded arrays is reached, a request raises OutOfMemoryError with that reason."""
    ctx = mx.sim(68)
    with spilling.using("host:32KiB"), storage.using(LimitResource(NaivePool(device.get(ctx)), 2 * SIZE)):
        held = []
        for value in range(4):  # in sequence, because two arrays cannot change places in this little memory
            held.append(mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx))
            held[-1].wait_to_read()
        before = waiting_bytes()
        assert before == 2 * SIZE
        with pytest.raises(OutOfMemoryError, match="host has 32,768 bytes, too few are left"):
            mx.nd.array(np.zeros(SIZE // 4, "float32"), ctx=ctx).asnumpy()
        settled()
        assert [one.chunk.is_offloaded for one in held] == [True, True, False, False]
        assert held.pop().asnumpy()[0] == 3
        settled()
        assert [float(x.asnumpy()[0]) for x in held] == [0, 1, 2]
        del held
        settled()


def test_threads_in_little_memory_see_their_values(folder):
    """Eight threads whose arrays need almost three times the memory read the right value at every check."""
    ctx, wrong = mx.cpu(9169), []

    def work(number):
        rng = np.random.RandomState(number)
        xs = [mx.nd.array(np.full(SIZE // 4, 10 * number + k, "float32"), ctx=ctx) for k in range(4)]
        want = [10 * number + k for k in range(4)]
        for _ in range(25):
            k, m = rng.randint(4, size=2)
            xs[k] += xs[m]
            want[k] += want[m]
            if rng.rand() < 0.3 and not (xs[k].asnumpy() == np.float32(want[k])).all():
                wrong.append((number, k))
        wrong.extend((number, k) for k in range(4) if not (xs[k].asnumpy() == np.float32(want[k])).all())

    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 12 * SIZE)):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settled()
    assert not wrong


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_training_in_half_memory_keeps_bits(kind, folder, monkeypatch):
    """Training in half of the memory, with spilling, gives the same parameter bits as with enough memory."""
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")

    def trained(ctx):
        net, shapes = mx.sym.Variable("data"), {"data": (64, 64), "softmax_label": (64,)}
        for k in range(8):
            net = mx.sym.relu(mx.sym.FullyConnected(net, num_hidden=64, name=f"fc{k}"))
        executor = mx.sym.SoftmaxOutput(net, name="softmax").simple_bind(ctx, **shapes)
        rng = np.random.RandomState(0)
        for name, array in executor.arg_dict.items():
            array[:] = 0 if "label" in name else rng.rand(*array.shape).astype("float32") * 0.1
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward()
            for name, gradient in executor.grad_dict.items():
                if name not in shapes:
                    executor.arg_dict[name][:] = executor.arg_dict[name] - 0.01 * gradient
            mx.nd.waitall()
        return {name: array.asnumpy().tobytes() for name, array in executor.arg_dict.items()}

    place = {"cpu": mx.cpu, "sim": mx.sim}[kind]
    with storage.using(LimitResource(NaivePool(device.get(place(70))), 1 << 40)) as pool:
        plain = trained(place(70))
        settled()
    limit = pool.statistics().peak_requested_bytes // 2
    began = traffic.outs
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(place(71))), limit)):
        assert trained(place(71)) == plain
        settled()
    assert traffic.outs > began


@pytest.mark.shows("WEFTPLAN_SPILL")
def test_variable_enables_spilling(monkeypatch, folder):
    """WEFTPLAN_SPILL with a list of targets enables spilling; ``true`` does not."""
    ctx = mx.cpu(9172)
    before = spilling._setting.targets
    for text, away in (("true", False), (f"file:{folder}:1MB", True)):
        config._reset_for_tests()
        monkeypatch.setenv("WEFTPLAN_SPILL", text)
        monkeypatch.setattr(slots.ARRAY_CHUNK, "value", spilling._first_chunk)
        with storage.using(LimitResource(NaivePool(device.get(ctx)), 2 * SIZE)):
            held = make_arrays(ctx, 2)
            if away:
                held += make_arrays(ctx, 1)
            else:
                with pytest.raises(OutOfMemoryError):
                    make_arrays(ctx, 1)
            assert [bool(getattr(one.chunk, "is_offloaded", False)) for one in held[:1]] == [away]
            held.clear()
            settled()
    config._reset_for_tests()
    spilling.start(before)


def test_bad_setting_raises_at_the_first_array(monkeypatch):
    """A bad WEFTPLAN_SPILL raises MXNetError when the first array is created."""
    monkeypatch.setenv("WEFTPLAN_SPILL", "disc:5GB")
    config._reset_for_tests()
    monkeypatch.setattr(slots.ARRAY_CHUNK, "value", spilling._first_chunk)
    with pytest.raises(MXNetError, match="'disc:5GB' in 'disc:5GB' is no offload target"):
        mx.nd.zeros((2,))
    config._reset_for_tests()
