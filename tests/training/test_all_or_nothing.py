"""A public method that fails leaves its object as it was: a failure at every call into another room and allocation.

Each case makes an object and an operation on it. ``tests/support/failures.py`` lets the operation fail at every point,
compares all fields and arrays before and after, and repeats the operation, which must then succeed.
"""

import pytest

import weftplan as mx
from tests.support.failures import check_all_or_nothing
from weftplan.errors import BudgetError, ParameterError

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


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Make all cases; they share the files of a checkpoint."""
    prefix = tmp_path_factory.mktemp("checkpoint") / "net"
    made = module()
    made.save_checkpoint(prefix, 1, save_optimizer_states=True)
    return operations(prefix)


@pytest.mark.parametrize("name", operations(""))
def test_module_changes_wholly_or_not_at_all(cases, name):
    """A method of a module that fails at any call of another room, or at any allocation, has changed nothing."""
    assert check_all_or_nothing(cases[name], MODULE, caches=("arg_dict", "grad_dict", "aux_dict")) > 0


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
