"""``dist_sync`` in several processes: buckets, engine operations and copies of its calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.ranks import Job, run_ranks

TWO = Job(2)


PUSH_CONTIGUOUS = """
    shapes = [(7,), (300, 11), (1,), (2, 1500), (5,)]
    for i, shape in enumerate(shapes):
        kv.init(i, mx.nd.zeros(shape, dtype="float64" if i == 4 else "float32"))
    kv.barrier()
    def refused(arrays):
        raise AssertionError("a copy")
    kept, np.concatenate = np.concatenate, refused
    grads = [mx.nd.full(s, i + rank, dtype="float64" if i == 4 else "float32") for i, s in enumerate(shapes)]
    for step in range(2):
        kv.push(list(range(5)), grads)
        for i, shape in enumerate(shapes):
            assert (value(i, shape, grads[i].dtype) == 2 * i + 1).all(), i
    np.concatenate = kept
    assert kv.statistics()["merged_bytes"] == sum(grad.nbytes for grad in grads)
"""
WITHOUT_SHARED_MEMORY = {"FLAGS_fuse_parameter_groups_size": "-1", "WEFTPLAN_KVSTORE_SHARED_MEMORY": "0"}


@TWO.runs(PUSH_CONTIGUOUS, **WITHOUT_SHARED_MEMORY)
def test_buckets_are_joined_without_a_copy():
    """Merge buffers of keys that are pushed together are contiguous, so an exchange concatenates nothing."""


def test_a_pull_makes_a_small_exchange_itself(tmp_path: Path):
    """A pull can run a small exchange inline: after at least one of 5,000 pulls nothing is pending on either rank."""
    run_ranks(
        tmp_path,
        2,
        """
        from weftplan import engine
        kv.init("w", mx.nd.zeros((3,)))
        out, gradient, pending = mx.nd.zeros((3,)), mx.nd.ones((3,)), engine.get().statistics
        for step in range(5000):
            kv.push("w", gradient)
            kv.pull("w", out)
            over = pending().pending == 0
            assert out.asnumpy().tolist() == [2] * 3
            kv.push("w", mx.nd.full((3,), over))
            if value("w").tolist() == [2] * 3:  # on both
                break
        else:
            raise AssertionError("it was always pending")
        kv.barrier()
        """,
    )


@TWO.runs(
    """
    eng = mx.engine.get()
    keys, shapes = list("abcd"), [(40_000,), (3,), (0,), (70, 100)]
    for key, shape in zip(keys, shapes):
        kv.init(key, mx.nd.zeros(shape))
    outs = [mx.nd.empty(shape) for shape in shapes]

    def step(gradients, keys=keys):
        for gradient in gradients:
            gradient.wait_to_read()
        mx.nd.waitall()
        kv.barrier()
        open_ = threading.Event()
        eng.push(open_.wait, (), (gradients[0].var,))
        before = eng.statistics().pushed
        kv.push(keys, gradients)
        pushed, before = eng.statistics().pushed - before, eng.statistics().pushed
        kv.pull(keys, outs)
        pulled = eng.statistics().pushed - before
        open_.set()
        for place, (key, out) in enumerate(zip(keys, outs)):
            assert (out.asnumpy() == 2 * place + 3).all(), (key, out)
        return pushed, pulled

    import threading
    gradients = [mx.nd.full(shape, rank + 1 + place) for place, shape in enumerate(shapes)]
    assert step(gradients) == (1, 1)

    one = mx.nd.full((80_000,), 1.0 + rank)   # parts of one array: a var that both would wait for is one
    gradients[0] = one[:40_000]
    assert step(gradients) == (1, 1)
    outs[0] = one[40_000:]                     # read by the push, written by the pull
    assert step(gradients) == (1, 1)
    kept, outs[1] = outs[1], mx.nd.empty((6,))[:3]
    assert step(gradients) == (1, 1)

    if rank == 0:
        spoil(gradients[1], "no gradient")
    kv.push(keys, gradients)
    kv.pull(keys, outs)
    for out in outs:
        try:
            out.wait_to_read()
            raise SystemExit("no error")
        except ValueError as error:
            assert rank == 0 and "no gradient" in str(error)
        except KVStoreError as error:
            assert rank == 1 and "rank 0 has no value for it" in str(error) and "no gradient" in str(error)
    try:
        mx.nd.waitall()
    except ValueError:
        assert rank == 0
    gradients = [mx.nd.full(shape, rank + 1 + place) for place, shape in enumerate(shapes)]
    outs = [mx.nd.empty(shape) for shape in shapes]
    assert step(gradients)[0] == 1
    """,
    FLAGS_fuse_parameter_groups_size="-1",
)
def test_one_operation_for_all_gradients_of_a_bucket():
    """A push of several keys is one engine operation, and a pull is another; a failed gradient fails all keys."""


@pytest.mark.parametrize("nbytes", [16, 400_000])
def test_pull_returns_last_push_before_it(tmp_path: Path, nbytes: int):
    """A pull returns, for each key, the sum of the last push before it, even if several pushes are pending.

    ``pushpull`` may write the sums into its own gradients, also if the outs are the gradients of other keys.
    """
    run_ranks(
        tmp_path,
        3,
        f"""
        import threading
        eng, size = mx.engine.get(), {nbytes} // 4
        keys = ["a", "b", "c"]
        kv.init(keys, [mx.nd.zeros((size,)) for _ in keys])

        def made(step):
            return [mx.nd.full((size,), 100 * step + 10 * place + rank) for place in range(3)]

        def total(step, place):
            return 3 * (100 * step + 10 * place) + 3

        outs, again = [mx.nd.empty((size,)) for _ in keys], [mx.nd.empty((size,)) for _ in keys]
        for step in range(1, 9):
            gradients, late, open_ = made(step), made(step + 50), threading.Event()
            mx.nd.waitall()
            eng.push(open_.wait, (), (gradients[0].var,))
            kv.push(keys, gradients)
            if step % 4 == 1:
                kv.push("b", late[1])
            if step % 4 == 2:
                kv.push(keys[1:], late[1:])
            kv.pull(keys, outs)
            kv.pull(keys[::-1], again[::-1])
            if step % 4 == 3:
                kv.push(keys, late)  # what is pulled before is of the push before
            open_.set()
            for place in range(3):
                was_late = (step % 4 == 1 and place == 1) or (step % 4 == 2 and place > 0)
                wanted = total(step + 50 * was_late, place)
                for pulled in (outs, again):
                    assert (pulled[place].asnumpy() == wanted).all(), (step, place, pulled[place], wanted)
            before = made(step)
            kv.pushpull(keys, before)
            for place, array in enumerate(before):
                assert (array.asnumpy() == total(step, place)).all(), (step, place, array)
            before = made(step)
            kv.pushpull(keys, before, [before[1], before[2], before[0]])  # each is read before it is written
            for place in range(3):
                assert (before[(place + 1) % 3].asnumpy() == total(step, place)).all(), (step, place)
        """,
        FLAGS_fuse_parameter_groups_size="-1",
    )


@pytest.mark.parametrize("groups", ["1", "2", "-1"])
def test_a_list_of_keys_is_updated_as_single_keys_are(tmp_path: Path, groups: str):
    """Updating a list of keys gives the bits of updating single keys, with at most three operations per bucket."""
    run_ranks(
        tmp_path,
        2,
        f"""
        groups = {groups}
        eng, shapes = mx.engine.get(), [(300, 70), (3,), (2000,), (5, 5), (1,)]
        rng = np.random.default_rng(rank)
        steps = [[mx.nd.array(rng.standard_normal(shape).astype("f4")) for shape in shapes] for _ in range(4)]
        found, pushed = [], []
        for listed in (True, False):
            store = mx.kv.create("dist_sync")
            keys, outs = [f"w{{place}}" for place in range(len(shapes))], [mx.nd.empty(shape) for shape in shapes]
            store.init(keys, [mx.nd.ones(shape) for shape in shapes])
            store.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
            for gradients in steps:
                mx.nd.waitall()
                before = eng.statistics().pushed
                if listed:
                    store.pushpull(keys, gradients, outs)
                else:
                    for key, gradient, out in zip(keys, gradients, outs):
                        store.pushpull(key, gradient, out)
                pushed.append(eng.statistics().pushed - before)
                found.append([out.asnumpy() for out in outs])
        for one, other in zip(found[:4], found[4:]):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other))
        count = -(-len(shapes) // groups) if groups > 0 else 1
        assert pushed[3] <= 3 * count, pushed      # exchange, update, copy
        assert pushed[7] >= 2 * len(shapes) or groups == 1, pushed
        """,
        FLAGS_fuse_parameter_groups_size=groups,
    )


@pytest.mark.parametrize("on_store", ["0", "1"])
def test_a_module_exchanges_its_gradients_in_buckets(tmp_path: Path, on_store: str):
    """A ``Module`` gets the same weights from buckets as from single gradients, with fewer engine operations."""
    run_ranks(
        tmp_path,
        2,
        """
        from weftplan.kvstore.buckets import BucketRule

        def trained(joins):
            mx.random.seed(3)
            store = mx.kv.create("dist_sync")
            if not joins:
                store._rule = BucketRule(1, None)
            data = mx.sym.Variable("data")
            for width in (20, 30, 10):
                layer = mx.sym.FullyConnected(data, num_hidden=width, name=f"layer{width}")
                data = mx.sym.Activation(layer, act_type="relu")
            module = mx.mod.Module(mx.sym.SoftmaxOutput(data, name="softmax"))
            module.bind([("data", (8, 12))], [("softmax_label", (8,))])
            module.init_params(mx.init.Xavier())
            module.init_optimizer(kvstore=store, optimizer="adam", optimizer_params={"learning_rate": 0.01})
            rng = np.random.default_rng(rank)
            for _ in range(4):
                images, labels = rng.standard_normal((8, 12)).astype("f4"), rng.integers(0, 10, 8)
                module.forward_backward(mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)]))
                mx.nd.waitall()
                before = mx.engine.get().statistics().pushed
                module.update()
                pushed = mx.engine.get().statistics().pushed - before
            return {name: array.asnumpy() for name, array in module.get_params()[0].items()}, pushed

        (joined, few), (single, many) = trained(True), trained(False)
        assert few <= 6 and many >= 12, (few, many)     # two buckets of three gradients
        for name, array in joined.items():
            assert array.tobytes() == single[name].tobytes(), name
        """,
        MXNET_UPDATE_ON_KVSTORE=on_store,
        FLAGS_fuse_parameter_groups_size="3",
    )


@TWO.runs(
    """
    net = mx.sym.Variable("data")
    for width in (7, 300, 5):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=width), act_type="tanh")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    shapes = {"data": (4, 3), "softmax_label": (4,)}
    reqs = {name: "null" if name in shapes else "write" for name in net.list_arguments()}
    bound = net.simple_bind(mx.cpu(), grad_req=reqs, **shapes)
    names = [name for name in net.list_arguments() if name not in shapes]
    for i, name in enumerate(names):
        bound.arg_dict[name][:] = np.random.default_rng(i).standard_normal(bound.arg_dict[name].shape) * 0.1
        kv.init(i, bound.arg_dict[name])
    for step in range(3):
        bound.arg_dict["data"][:] = 0.1 * (1 + step + rank)
        bound.arg_dict["softmax_label"][:] = rank
        bound.forward(is_train=True)
        bound.backward()
        mine = [bound.grad_dict[name].asnumpy() for name in names]
        kv.push(list(range(len(names))), [bound.grad_dict[name] for name in names])
        sums = [value(i, grad.shape) for i, grad in enumerate(mine)]
        for name, grad in zip(names, mine):
            assert (bound.grad_dict[name].asnumpy() == grad).all(), name  # a push changes no gradient
        assert (sums[-1] != mine[-1]).any()
    assert kv.statistics()["joined_bytes"] == 0
    apart = [mx.nd.array(grad) for grad in mine]
    kv.push(list(range(len(names))), apart)
    assert all((value(i, grad.shape) == sums[i]).all() for i, grad in enumerate(mine))
    assert kv.statistics()["joined_bytes"] == sum(grad.nbytes for grad in mine)
    """,
    FLAGS_fuse_parameter_groups_size="-1",
    WEFTPLAN_KVSTORE_SHARED_MEMORY="0",
)
def test_buckets_of_a_bound_network_copy_nothing():
    """Gradients of a bound network are contiguous in exchange order and not copied; separate arrays are copied."""


def test_repeated_calls_return_right_sums(tmp_path: Path):
    """Repeated pushes and pulls of the same arrays give the current sums or weights, whatever happens in between.

    In between, the test changes the outs, reads and writes arrays, pushes from another thread, fails a gradient, sets
    an optimizer, and closes the store on one rank.
    """
    run_ranks(
        tmp_path,
        3,
        """
        import threading
        size = 6000
        keys = ["a", "b"]
        kv.init(keys, [mx.nd.zeros((size,)) for _ in keys])
        gradients, outs, others = ([mx.nd.zeros((size,)) for _ in keys] for _ in range(3))
        count = 3
        def check(step, outs=outs, between=None):
            for place, gradient in enumerate(gradients):
                gradient[:] = step + 10 * place + 100 * rank
            mx.nd.waitall()
            kv.push(keys, gradients)
            if between:
                between()
            kv.pull(keys, outs)
            for place, out in enumerate(outs):
                want = sum(step + 10 * place + 100 * one for one in range(count))
                assert (out.asnumpy() == want).all(), (step, place)
        for step in range(6):
            check(step)
        for step in range(6):
            check(step, (outs, others)[step % 2])
        read = []
        for step in range(4):  # the old values are read before the new ones are written
            before = outs[0].asnumpy()[0]
            late = mx.nd.zeros((size,))
            check(step, between=lambda: outs[0].copyto(late))
            assert (late.asnumpy() == before).all()
            check(step, between=lambda: gradients[1].__setitem__(slice(None), 7))
            pushed = threading.Thread(target=lambda: kv.push(keys, gradients))
            check(step, between=lambda: (pushed.start(), pushed.join()))
        for step in range(4):
            gradients[1][:] = 3
            if rank == step % 3:
                spoil(gradients[1])
            kv.push(keys, gradients)
            kv.pull(keys, outs)
            failed = 0
            for array in (*outs, *gradients):
                try:
                    array.wait_to_read()
                except Exception as error:
                    assert "no data left" in str(error), error
                    failed += 1
            assert failed >= 2, failed
            check(step)
            check(step)
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        kept = outs[0].asnumpy()
        for step in range(4):
            for gradient in gradients:
                gradient[:] = rank
            kv.push(keys, gradients)
            kv.pull(keys, outs)
            kept = kept - 3
            np.testing.assert_array_equal(outs[0].asnumpy(), kept)
        if rank == 2:
            kv.close()
        else:
            for step in range(4):
                for gradient in gradients:
                    gradient[:] = rank
                kv.push(keys, gradients)
                kv.pull(keys, outs)
                kept = kept - 1
                np.testing.assert_array_equal(outs[0].asnumpy(), kept)
        """,
        FLAGS_fuse_parameter_groups_size="-1",
    )
