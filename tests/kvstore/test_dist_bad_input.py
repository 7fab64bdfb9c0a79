"""Invalid or differing calls of the ranks of a distributed store: they raise errors, and the store works afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.ranks import Job, run_ranks

THREE = Job(3)

GO_ON = """
one = mx.nd.ones((3,))
kv.push(["a", "b", "c"], [one, one, one])
for key in "abc":
    assert value(key).tolist() == [size] * 3, (key, value(key))
"""

BEGIN = """
kv.init(["a", "b", "c"], [mx.nd.zeros((3,))] * 3)
one = mx.nd.ones((3,))
"""


@THREE.runs(
    BEGIN
    + """
kv.push(["a", "b"] if rank else ["a", "c"], [one, one])
own = "'b' (3,) float32, 'a' (3,) float32" if rank else "'c' (3,) float32, 'a' (3,) float32"
other = "'c' (3,) float32, 'a' (3,) float32" if rank else "'b' (3,) float32, 'a' (3,) float32"
says(lambda: value("a"), f"rank {rank} wants to sum {own}", f"to sum {other}", "in the same order, on every rank")
"""
    + GO_ON
)
def test_other_keys_on_one_rank():
    """If one rank pushes other keys, the error of every rank quotes both lists, its own first."""


@THREE.runs(
    BEGIN
    + """
for key in ("ab" if rank != 1 else "ba"):
    kv.push(key, one)
for key in "ab":
    says(lambda: value(key), f"rank {rank} wants to sum '", "'a' (3,) float32", "'b' (3,) float32")
"""
    + GO_ON
)
def test_another_order_on_one_rank():
    """If one rank pushes two keys in another order, both exchanges fail on every rank and quote both keys."""


@THREE.runs(
    BEGIN
    + """
keys = ["a", "b", "c"] if rank else ["c", "a", "b"]
kv.push(keys, [mx.nd.full((3,), ord(key)) for key in keys])
for key in keys:
    assert value(key).tolist() == [ord(key) * size] * 3
"""
    + GO_ON
)
def test_the_order_within_a_list():
    """A list of keys is exchanged in the order of their creation, so the ranks may list keys in different orders."""


@THREE.runs(
    """
kv.init("w", mx.nd.zeros((3,) if rank else (4,)))
says(lambda: value("w", (3,) if rank else (4,)), f"rank {rank} wants to init 'w'", "(3,)", "(4,)")
kv.init("v", mx.nd.zeros((3,), dtype="float32" if rank else "float64"))
says(lambda: value("v", (3,), "float32" if rank else "float64"), f"rank {rank} wants to init 'v'", "float32", "float64")
kv.init(["a", "b"], [mx.nd.ones((3,))] * 2)
assert value("b").tolist() == [1, 1, 1]
"""
)
def test_another_shape_or_dtype_on_one_rank():
    """If an initial value has another shape or dtype on one rank, the error of every rank quotes both.

    Other keys work afterwards.
    """


@THREE.runs(
    BEGIN
    + """
if rank == 1:
    double = mx.nd.ones((3,), dtype="float64")
    wrong = [
        (lambda: kv.push("a", mx.nd.ones((4,))), "push: key 'a' holds (3,) float32, got (4,) float32"),
        (lambda: kv.push(["a", "b"], [one, double]), "key 'b' holds (3,) float32, got (3,) float64"),
        (lambda: kv.push(["a", "b"], [one]), "2 keys need a list of 2 items as value, got 1"),
        (lambda: kv.push(["a", "b"], one), "2 keys need a list of 2 items as value, got NDArray"),
        (lambda: kv.pushpull(["a", "b"], [one, one], [one]), "2 keys need a list of 2 items as out, got 1"),
        (lambda: kv.pull(["a", "b"], [mx.nd.zeros((3,))] * 3), "2 keys need a list of 2 items as out, got 3"),
        (lambda: kv.push(["a", "z"], [one, one]), "push: key 'z' doesn't exist"),
        (lambda: kv.init(["d", "e"], [one]), "2 keys need a list of 2 items as value, got 1"),
        (lambda: kv.init(["d", "d"], [one, one]), "key 'd': init takes one value per key, got 2"),
        (lambda: kv.init("a", one), "key 'a' is initialised already"),
    ]
    for call, words in wrong:
        says(call, "rank 1: ", words)
"""
    + GO_ON,
    WEFTPLAN_KVSTORE_TIMEOUT="20",
)
def test_a_bad_call_of_one_rank():
    """An invalid call raises an error on its rank only and names the rank; all ranks can exchange afterwards."""


@THREE.runs(
    BEGIN
    + """
kv.push(["a", "b", "a"], [one, one, one])
assert value("a").tolist() == [2 * size] * 3
assert value("b").tolist() == [size] * 3
kv.push(["a", "a"] if rank else ["a"], [one, one] if rank else [one])
assert value("a").tolist() == [2 * size - 1] * 3
outs = [mx.nd.zeros((3,)) for _ in range(3)]
kv.pushpull(["b", "c", "b"], [one, one, one], outs)
assert [out.asnumpy().tolist() for out in outs] == [[2 * size] * 3, [size] * 3, [2 * size] * 3]
"""
    + GO_ON
)
def test_a_key_twice_in_a_list():
    """If a key is listed twice, its arrays are summed like those of two devices, and ``pushpull`` fills both outs."""


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
@pytest.mark.parametrize("nbytes", [12, 400_000])
def test_a_store_after_a_lost_rank(tmp_path: Path, store: str, nbytes: int):
    """After a rank is lost each exchange raises the same WorkerLostError, and then ``close`` ends the store."""
    done = run_ranks(
        tmp_path,
        3,
        f"""
        shape = ({nbytes} // 4,)
        kv.init(["a", "b"], [mx.nd.zeros(shape)] * 2)
        kv.push(["a", "b"], [mx.nd.ones(shape)] * 2)
        assert (value("b", shape) == 3).all()
        kv.barrier()
        meet("barrier")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

        def lost(call):
            begun = time.monotonic()
            try:
                call()
            except WorkerLostError as error:
                assert "rank 1 died" in str(error), error
                assert time.monotonic() - begun < 15
                return
            raise AssertionError("no error")

        def push(keys):
            kv.push(keys, [mx.nd.ones(shape) for _ in keys])
            value(keys[0], shape)

        lost(lambda: push(["a"]))
        for _ in range(2):
            lost(lambda: push(["a", "b"]))
            lost(kv.barrier)
            lost(lambda: kv.set_optimizer(mx.optimizer.create("sgd")))
            lost(lambda: kv.set_gradient_compression({{"type": "2bit", "threshold": 0.5}}))
        kv.init("c", mx.nd.zeros(shape))
        lost(lambda: value("c", shape))
        begun = time.monotonic()
        kv.close()
        assert time.monotonic() - begun < 15
        says(lambda: kv.push("b", mx.nd.ones(shape)), "this store was closed")
        says(kv.barrier, "this store was closed")
        kv.close()
        print("closed", rank, flush=True)
        """,
        ok=False,
        STORE=store,
        WEFTPLAN_KVSTORE_TIMEOUT="30",
    )
    assert sorted(line for line in done.stdout.split("\n") if line) == ["closed 0", "closed 2"], (
        done.stdout + done.stderr
    )
