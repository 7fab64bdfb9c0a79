"""A public method that fails leaves its object as it was: a failure at every call into another room and allocation.

Each case makes an object and an operation on it. ``tests/support/failures.py`` lets the operation fail at every point,
compares all fields and arrays before and after, and repeats the operation, which must then succeed.
"""

import gc

import numpy as np
import pytest

import weftplan as mx
from tests.contract.iterators import ITERATORS, boxes, records
from tests.support.failures import check_all_or_nothing
from weftplan.errors import BudgetError, ParameterError
from weftplan.kvstore import layout

sym = mx.sym
MODULE = ("training.module",)
SHAPES = {"data_shapes": [("data", (4, 6))], "label_shapes": [("softmax_label", (4,))]}


def network(units=3):
    """Return a classifier with a batch norm, whose moving averages are auxiliary states."""
    net = sym.BatchNorm(sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="one"), name="norm")
    return sym.SoftmaxOutput(sym.FullyConnected(net, num_hidden=units, name="two"), name="softmax")


def module(stage="updating", contexts=None, **settings):
    """Return a module as it is after ``bind``, after ``init_params`` or after ``init_optimizer``."""
    mx.random.seed(7)
    made = mx.mod.Module(network(), context=contexts or mx.cpu(), **settings)
    made.bind(**SHAPES)
    if stage != "bound":
        made.init_params(mx.init.Xavier())
    if stage == "updating":
        made.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
        made.forward(batch(), is_train=True)
        made.backward()
        made.update()
    return made


def executor_operations():
    """Return name -> function that makes (objects, operation), for executors."""

    def bound(call, run=False):
        made = network().simple_bind(mx.cpu(), data=(4, 6), softmax_label=(4,), grad_req="write")
        made.copy_params_from(*values())
        if run:
            made.forward(is_train=True)
        return made, lambda: call(made)

    args, aux = values()
    head = np.ones((4, 3), np.float32)
    return {
        "executor: copy_params_from": lambda: bound(lambda made: made.copy_params_from(args, aux)),
        "executor: forward": lambda: bound(lambda made: made.forward(is_train=True, data=np.ones((4, 6), np.float32))),
        "executor: forward again": lambda: bound(lambda made: made.forward(is_train=False), run=True),
        "executor: backward": lambda: bound(lambda made: made.backward(head), run=True),
        "executor: reshape": lambda: bound(lambda made: made.reshape(data=(2, 6), softmax_label=(2,)), run=True),
        "executor: set_monitor_callback": lambda: bound(lambda made: made.set_monitor_callback(print, True)),
    }


def store_operations(prefix):
    """Return name -> function that makes (objects, operation), for kvstores and updaters."""

    def stored(call, name="local", optimizer="sgd"):
        store = mx.kv.create(name)
        store.init(["a", "b"], [mx.nd.ones((3,)), mx.nd.ones((2, 2))])
        if optimizer:
            store.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1, momentum=0.9))
            store.push("a", mx.nd.ones((3,)))
        if name == "dist_async":  # its server has applied the push, and the copy of the value here is the server's
            store.pull("a", mx.nd.ones((3,)))
            store.barrier()
        return store, lambda: call(store)

    def updating(call, index=("a", "b")):
        updater = mx.kv.Updater(mx.optimizer.create("adam")) if hasattr(mx.kv, "Updater") else None
        updater = updater or mx.optimizer.get_updater(mx.optimizer.create("adam"))
        weights = [mx.nd.ones((3,)) for _ in index]
        grads = [mx.nd.ones((3,)) for _ in index]
        updater(list(index), grads, weights)
        return (updater, weights), lambda: call(updater, list(index), grads, weights)

    two, again = [mx.nd.ones((3,)), mx.nd.ones((2, 2))], [mx.nd.ones((4,)), mx.nd.ones((5,))]
    source, _ = stored(lambda store: None)
    source.save_optimizer_states(f"{prefix}.kv")
    states = updating(lambda *call: None)[0][0].get_states()
    cases = {}
    for name in ("local", "device", "dist_sync", "dist_device_sync", "dist_async"):
        cases |= {
            f"{name}: init": lambda name=name: stored(lambda store: store.init(["c", "d"], again), name),
            f"{name}: broadcast": lambda name=name: stored(
                lambda store: store.broadcast(["c", "d"], again, [array.copy() for array in again]), name
            ),
            f"{name}: push": lambda name=name: stored(
                lambda store: store.push(["a", "b"], two), name, "sgd" if name == "dist_async" else None
            ),
            f"{name}: pull": lambda name=name: stored(
                lambda store: store.pull(["a", "b"], [array.copy() for array in two]), name
            ),
            f"{name}: pushpull": lambda name=name: stored(lambda store: store.pushpull(["a", "b"], two), name),
            f"{name}: set_optimizer": lambda name=name: stored(
                lambda store: store.set_optimizer(mx.optimizer.create("adam")), name
            ),
            f"{name}: load_optimizer_states": lambda name=name: stored(
                lambda store: store.load_optimizer_states(f"{prefix}.kv"), name
            ),
        }
    compression = {"type": "2bit", "threshold": 0.5}
    return cases | {
        "device: set_gradient_compression": lambda: stored(
            lambda store: store.set_gradient_compression(compression), "device"
        ),
        "updater: call": lambda: updating(lambda updater, *call: updater(*call)),
        "updater: call for a new index": lambda: updating(
            lambda updater, _, grads, weights: updater(["a", "c"], grads, weights)
        ),
        "updater: set_states": lambda: updating(lambda updater, *call: updater.set_states(states)),
        "updater: add_states": lambda: updating(lambda updater, *call: updater.add_states(states)),
    }


def optimizer_operations():
    """Return name -> function that makes (objects, operation), for optimizers."""

    def made(call, **settings):
        optimizer = mx.optimizer.create(
            "adam", sym=network(), param_idx2name={0: "one_weight", 1: "one_bias"}, **settings
        )
        weight, grad = mx.nd.ones((3,)), mx.nd.ones((3,))
        state = optimizer.create_state(0, weight)
        optimizer.update(0, weight, grad, state)
        return (optimizer, weight, state), lambda: call(optimizer, weight, grad, state)

    def many(optimizer, weight, grad, state):
        optimizer.update_together(
            [0, 1], [weight, weight.copy()], [grad, grad], [state, optimizer.create_state(1, weight)]
        )

    return {
        "optimizer: set_lr_mult": lambda: made(lambda optimizer, *_: optimizer.set_lr_mult({"one_weight": 2.0})),
        "optimizer: update": lambda: made(lambda optimizer, *call: optimizer.update(0, *call)),
        "optimizer: update_multi_precision": lambda: made(
            lambda optimizer, *call: optimizer.update_multi_precision(0, *call)
        ),
        "optimizer: update_together": lambda: made(many),
    }


def image_iterator(folder, detection=False):
    """Return an iterator of ``mx.image`` over seven images of a record file."""
    (boxes if detection else records)(folder)  # writes the file
    path = folder / ("boxes.rec" if detection else "images.rec")
    make = mx.image.ImageDetIter if detection else mx.image.ImageIter
    return make(
        3, (3, 4, 4), path_imgrec=str(path), shuffle=not detection, **({} if detection else {"rand_mirror": True})
    )


def iterator_operations(folder):
    """Return name -> function that makes (objects, operation), for iterators."""
    kinds = {name: lambda make=make: make(folder) for name, make in ITERATORS.items() if "worker" not in name}
    kinds |= {"ImageIter": lambda: image_iterator(folder), "ImageDetIter": lambda: image_iterator(folder, True)}

    def started(kind, call, batches):
        mx.random.seed(7)
        iterator = kinds[kind]()
        for _ in range(batches):
            next(iterator, None)
        return iterator, lambda: call(iterator)

    cases = {}
    for kind in kinds:
        mx.random.seed(7)
        first = kinds[kind]()
        state = None if kind.startswith("Image") else first.state()  # MXNet's classes keep no position
        verbs = [("next", lambda it: next(it, None), (3, 4)), ("reset", lambda it: it.reset(), (3,))]
        if state is not None:
            verbs.append(("set_state", lambda it, state=state: it.set_state(state), (4,)))
        getattr(first, "close", lambda: None)()
        for verb, call, started_after in verbs:
            for batches in started_after:
                case = f"{kind}: {verb} after {batches}"
                cases[case] = lambda kind=kind, call=call, batches=batches: started(kind, call, batches)
    return cases


def batch(samples=4):
    """Return a batch of this number of samples."""
    return mx.io.DataBatch([mx.nd.ones((samples, 6))], [mx.nd.zeros((samples,))])


def values():
    """Return values for all parameters and states of the network."""
    args, aux = module("ready").get_params()
    return {name: value + 1 for name, value in args.items()}, {name: value + 1 for name, value in aux.items()}


def operations(prefix):
    """Return name -> function that makes (objects, operation on them)."""
    two = [mx.cpu(0), mx.cpu(1)]

    def on(made, call):
        return made, lambda: call(made)

    def of_module(call, stage="updating", **settings):
        return lambda: on(module(stage, **settings), call)

    def monitored():
        made, monitor = module("ready"), mx.mon.Monitor(1)
        made.install_monitor(mx.mon.Monitor(2))
        return (made, monitor), lambda: made.install_monitor(monitor)

    def watched(call):
        made, monitor = module("ready"), mx.mon.Monitor(1)
        made.install_monitor(monitor)
        return (made, monitor), lambda: call(made)

    def with_store():
        store, made = mx.kv.create("local"), module("ready", contexts=two)
        return (made, store), lambda: made.init_optimizer(kvstore=store, optimizer="adam")

    def loaded():
        made = mx.mod.Module.load(prefix, 1)
        return made, lambda: made.bind(**SHAPES)

    def buckets(call, bound=True):
        mx.random.seed(7)
        made = mx.mod.BucketingModule(lambda key: (network(), ("data",), ("softmax_label",)), default_bucket_key=6)
        if bound:
            made.bind(**SHAPES)
            made.init_params(mx.init.Xavier())
            made.init_optimizer(optimizer="sgd")
            made.switch_bucket(5, [("data", (2, 6))], [("softmax_label", (2,))])
        return made, lambda: call(made)

    def chain(call, bound=True):
        mx.random.seed(7)
        made = mx.mod.SequentialModule()
        first = sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="first")
        made.add(mx.mod.Module(first, label_names=None))
        made.add(mx.mod.Module(network()), take_labels=True, auto_wiring=True)
        if bound:
            made.bind(**SHAPES)
            made.init_params(mx.init.Xavier())
        return made, lambda: call(made)

    rebind = {**SHAPES, "force_rebind": True}
    args, aux = values()
    smaller = [("data", (2, 6))], [("softmax_label", (2,))]
    return {
        "bind": lambda: on(mx.mod.Module(network()), lambda made: made.bind(**SHAPES)),
        "bind of a checkpoint": loaded,
        "rebind": of_module(lambda made: made.bind(**rebind, grad_req="add", inputs_need_grad=True)),
        "rebind within a budget": of_module(lambda made: made.bind(**rebind, memory_budget="1GB")),
        "rebind with a monitor": lambda: watched(lambda made: made.bind(**rebind)),
        "reshape": of_module(lambda made: made.reshape(*smaller)),
        "reshape with a monitor": lambda: watched(lambda made: made.reshape(*smaller)),
        "forward of another batch size": of_module(lambda made: made.forward(batch(2))),
        "init_params": of_module(lambda made: made.init_params(mx.init.One()), "bound"),
        "init_params again": of_module(lambda made: made.init_params(mx.init.One(), force_init=True)),
        "set_params": of_module(lambda made: made.set_params(args, aux)),
        "set_params on two contexts": of_module(lambda made: made.set_params(args, aux), contexts=two),
        "init_optimizer": of_module(lambda made: made.init_optimizer(optimizer="adam"), "ready"),
        "init_optimizer again": of_module(lambda made: made.init_optimizer(optimizer="adam", force_init=True)),
        "init_optimizer within a budget": of_module(
            lambda made: made.init_optimizer(optimizer="adam"), "ready", memory_budget="1GB"
        ),
        "init_optimizer with a store": with_store,
        "load_optimizer_states": of_module(lambda made: made.load_optimizer_states(f"{prefix}-0001.states")),
        "install_monitor": monitored,
        "update": of_module(lambda made: made.update()),
        "buckets: bind": lambda: buckets(lambda made: made.bind(**SHAPES), bound=False),
        "buckets: rebind": lambda: buckets(lambda made: made.bind(**rebind, grad_req="add")),
        "buckets: switch_bucket": lambda: buckets(lambda made: made.switch_bucket(4, *smaller)),
        "buckets: set_params": lambda: buckets(lambda made: made.set_params(args, aux)),
        "buckets: init_optimizer": lambda: buckets(lambda made: made.init_optimizer(optimizer="adam", force_init=True)),
        "buckets: install_monitor": lambda: buckets(lambda made: made.install_monitor(mx.mon.Monitor(1))),
        "chain: bind": lambda: chain(lambda made: made.bind(**SHAPES), bound=False),
        "chain: rebind": lambda: chain(lambda made: made.bind(**rebind, inputs_need_grad=True)),
        "chain: init_params": lambda: chain(lambda made: made.init_params(mx.init.One(), force_init=True)),
        "chain: init_optimizer": lambda: chain(lambda made: made.init_optimizer(optimizer="adam")),
    }


ROOMS = {
    "executor": ("executor",),
    "local": ("kvstore",),
    "device": ("kvstore",),
    **dict.fromkeys(("dist_sync", "dist_device_sync", "dist_async"), ("kvstore",)),
    "updater": ("kvstore", "training.optimizers"),
    "optimizer": ("training.optimizers",),
    "iterator": ("data",),
}
"""The rooms whose calls of other rooms fail, by the first word of a case; of other cases: ``training.module``."""
CACHES = (
    *("arg_dict", "grad_dict", "aux_dict"),
    *("_methods", "_pushes", "_pulls", "_merged", "_load", "_staging"),
    *("_sending", "_waiting", "_undelivered"),
    *("_watches", "_prepared", "_repeatable", "current_batch", "_asked", "_version", "_group", "_lazy"),
)
"""Fields that only save work: views, ways of summing, prepared calls and their version, later buffers, batches read.

The group of a distributed store counts messages, which other ranks have counted, too; a server's thread has messages,
and the sequencer's thread sets ``_lazy``.
"""


def all_cases(folder):
    """Return every case; ``folder`` gets the files that some of them read."""
    prefix = folder / "net"
    module().save_checkpoint(prefix, 1, save_optimizer_states=True)
    iterators = {f"iterator: {name}": case for name, case in iterator_operations(folder).items()}
    modules = {f"module: {name}": case for name, case in operations(prefix).items()}
    return modules | executor_operations() | store_operations(prefix) | optimizer_operations() | iterators


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("kind", ["module", *ROOMS])
def test_a_failure_changes_nothing(tmp_path, kind):
    """A method that fails at any call of another room, or at any allocation, has changed nothing."""
    cases = {name: case for name, case in all_cases(tmp_path).items() if name.startswith(f"{kind}:")}
    failures, mistakes = 0, []
    for name, make in cases.items():
        try:
            failures += check_all_or_nothing(make, ROOMS.get(kind, MODULE), CACHES)
        except Exception as error:
            mistakes.append(f"{name}: {type(error).__name__}: {error}")
    gc.collect()  # the cycles of errors and iterators, whose files Python closes with a warning
    assert not mistakes, "\n".join(mistakes)
    assert failures > len(cases) / 2  # the end of an epoch allocates nothing


def test_rebind_beyond_the_budget_keeps_the_old_binding():
    """After a BudgetError of ``bind(force_rebind=True)`` the options and the executors are those of the last bind."""
    made = module()
    with pytest.raises(BudgetError):
        made.bind(**SHAPES, force_rebind=True, grad_req="add", inputs_need_grad=True, memory_budget=1)
    assert (made._grad_req, made.memory_budget, made.inputs_need_grad) == ("write", None, False)
    made.forward(batch(2), is_train=True)  # binds for another batch size, with the options of the last bind
    made.backward()
    made.update()


@pytest.mark.parametrize("verb", ["init_params", "set_params"])
def test_unknown_names_are_reported_under_the_called_method(verb):
    """The error for unknown parameter names starts with the method that was called."""
    made = module("bound")
    args, aux = values()
    with pytest.raises(ParameterError, match=f"^{verb}: unknown names "):
        getattr(made, verb)(arg_params={"more": args["one_weight"], **dict([*args.items()][1:])}, aux_params=aux)


def test_a_buffer_that_cannot_be_made_has_no_load(monkeypatch):
    """A store counts the bytes of a merge buffer on its device only if the buffer exists: later placement uses them."""
    store = mx.kv.create("device")
    store.init("a", mx.nd.ones((3,)))
    store.set_optimizer(mx.optimizer.create("sgd"))

    def refuse(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(layout, "zeros", refuse)
        with pytest.raises(MemoryError):
            store.push("a", mx.nd.ones((3,), ctx=mx.cpu(1)))
    assert store._load == {}
    store.push("a", mx.nd.ones((3,), ctx=mx.cpu(1)))
    assert list(store._load.values()) == [12]
