"""Scripts whose every call of a user's methods is recorded, over the API that MXNet 1.9.1 and weftplan share.

A class of the user overrides each public method that MXNet's loops may call. The override writes a line with the
arguments as they came, by position or by name, and calls the inherited method; calls within it are indented.
"""

import logging
import os
import tempfile

import numpy as np

MODULE = (
    "bind", "init_params", "set_params", "get_params", "init_optimizer", "borrow_optimizer", "forward_backward",
    "forward", "backward", "update", "update_metric", "get_outputs", "get_input_grads", "get_states", "set_states",
    "prepare", "install_monitor", "reshape", "score", "predict", "iter_predict", "save_checkpoint", "save_params",
    "load_params", "save_optimizer_states", "load_optimizer_states", "switch_bucket", "fit",
)  # fmt: skip
ITERATOR = ("__iter__", "__next__", "next", "iter_next", "reset", "getdata", "getlabel", "getindex", "getpad")
METRIC = (
    "update", "update_dict", "reset", "reset_local", "get", "get_global", "get_name_value", "get_global_name_value",
)  # fmt: skip
MONITOR = ("install", "tic", "toc", "toc_print")
INITIALIZER = (
    "__call__", "_init_weight", "_init_bias", "_init_gamma", "_init_beta", "_init_zero", "_init_one", "_init_default",
    "dumps",
)  # fmt: skip
OPTIMIZER = (
    "create_state", "create_state_multi_precision", "update", "update_multi_precision", "set_learning_rate",
    "set_lr_mult", "set_wd_mult",
)  # fmt: skip
STORE = (
    "init", "broadcast", "push", "pull", "pushpull", "row_sparse_pull", "set_optimizer", "set_gradient_compression",
    "is_capable", "save_optimizer_states", "load_optimizer_states",
)  # fmt: skip


class Recorder:
    """Lines of calls, and classes and functions that write them.

    Args:
        mx: the package, ``mxnet`` or ``weftplan``.
    """

    def __init__(self, mx):
        self.mx, self.lines, self.depth = mx, [], 0

    def describe(self, value):
        """Return an argument as text without addresses and values of arrays."""
        mx = self.mx
        kinds = (
            (mx.nd.NDArray, "array"), (mx.sym.Symbol, "symbol"), (mx.io.DataBatch, "batch"),
            (mx.metric.EvalMetric, "metric"), (mx.mod.BaseModule, "module"), (mx.optimizer.Optimizer, "optimizer"),
            (mx.init.Initializer, "initializer"), (mx.mon.Monitor, "monitor"), (mx.io.DataIter, "iterator"),
            (mx.kv.KVStoreBase, "store"), (mx.executor.Executor, "executor"),
        )  # fmt: skip
        for kind, text in kinds:
            if isinstance(value, kind):
                return text
        if isinstance(value, mx.io.DataDesc):
            return f"{value.name}{tuple(value.shape)}"
        if isinstance(value, mx.model.BatchEndParam):
            known = ", ".join(sorted(key for key in value.locals if key in SHARED))
            line = f"locals: {known}"
            if line not in self.lines:  # once, since it is long
                self.lines.append(line)
            return f"BatchEndParam({value.epoch}, {value.nbatch}, {self.describe(value.eval_metric)})"
        if value is None or isinstance(value, (bool, int, float, np.number)):
            return repr(value)
        if isinstance(value, (str, os.PathLike)):
            return "file" if os.sep in str(value) else repr(str(value))
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self.describe(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self.describe, value)) + "]"
        return "function" if callable(value) else type(value).__name__

    def call(self, name, args, kwargs):
        """Write the line of a call."""
        texts = [*map(self.describe, args), *(f"{key}={self.describe(kwargs[key])}" for key in sorted(kwargs))]
        self.lines.append("  " * self.depth + f"{name}({', '.join(texts)})")

    def watch(self, who, base, methods, **fields):
        """Return a subclass of ``base`` whose methods write their calls."""
        recorder = self

        def override(method):
            def recorded(self, *args, **kwargs):
                recorder.call(f"{who}.{method}", args, kwargs)
                recorder.depth += 1
                try:
                    return getattr(super(watched, self), method)(*args, **kwargs)
                finally:
                    recorder.depth -= 1

            return recorded

        own = {method: override(method) for method in methods if hasattr(base, method)}
        watched = type(f"My{who}", (base,), {**own, **fields})
        return watched

    def callback(self, name):
        """Return a function that writes its calls."""
        return lambda *args, **kwargs: self.call(name, args, kwargs)


SHARED = (
    "self", "epoch", "nbatch", "eval_metric", "data_batch", "eval_batch", "train_data", "eval_data", "monitor",
    "begin_epoch", "num_epoch", "validation_metric", "actual_num_batch", "num_batch", "arg_params", "aux_params",
    "allow_missing", "batch_end_callback", "epoch_end_callback", "eval_end_callback", "eval_batch_end_callback",
    "force_init", "force_rebind", "initializer", "kvstore", "optimizer", "optimizer_params", "reset",
    "score_end_callback", "sparse_row_id_fn", "tic", "end_of_batch",
)  # fmt: skip
"""Variables of MXNet's loops that a callback may read in ``param.locals``."""


def network(mx):
    """Return a network with a state: two layers, of which the first is normalized."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc1")
    net = mx.sym.BatchNorm(net, name="bn")
    net = mx.sym.FullyConnected(net, num_hidden=2, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def metric_class(recorder):
    """Return the class of a metric that counts its batches."""

    def update(self, labels, preds):
        self.sum_metric += 1
        self.num_inst += 1

    base = type("Counting", (recorder.mx.metric.EvalMetric,), {"update": update})
    return recorder.watch("metric", base, METRIC)


def optimizer_class(recorder, base=None):
    """Return the class of an optimizer that subtracts the gradient, or one derived from ``base``."""

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight[:] = weight - self._get_lr(index) * grad

    plain = recorder.mx.optimizer.Optimizer
    base = base or type("Plain", (plain,), {"update": update, "create_state": lambda self, index, weight: None})
    return recorder.watch("optimizer", base, OPTIMIZER)


def iterator(recorder, samples=5, batch=2, **settings):
    """Return an iterator of ``samples`` samples; the last batch is padded."""
    data = np.arange(samples * 4, dtype=np.float32).reshape(samples, 4) / 10
    made = recorder.watch("iterator", recorder.mx.io.NDArrayIter, ITERATOR)
    result = made(data, np.arange(samples) % 2, batch_size=batch, **settings)
    recorder.lines.clear()
    return result


def everything(recorder, contexts=1, optimizer=None, epochs=1, **settings):
    """Train with each object of the user's own; then score and predict."""
    mx = recorder.mx
    module = recorder.watch("module", mx.mod.Module, MODULE)(network(mx), context=[mx.cpu(k) for k in range(contexts)])
    train, check = iterator(recorder, 8, 4), iterator(recorder, 8, 4)
    metric = metric_class(recorder)("mine")
    monitor = recorder.watch("monitor", mx.mon.Monitor, MONITOR)(1, pattern="fc1_output")
    initializer = recorder.watch("initializer", mx.init.Xavier, INITIALIZER)()
    chosen = optimizer_class(recorder, optimizer)(learning_rate=0.1, rescale_grad=0.25)
    recorder.lines.clear()
    module.fit(
        train,
        eval_data=check,
        eval_metric=metric,
        epoch_end_callback=recorder.callback("epoch_end"),
        batch_end_callback=[recorder.callback("batch_end"), recorder.callback("second_batch_end")],
        eval_end_callback=recorder.callback("eval_end"),
        eval_batch_end_callback=recorder.callback("eval_batch_end"),
        initializer=initializer,
        optimizer=chosen,
        monitor=monitor,
        num_epoch=epochs,
        **settings,
    )
    return module


def fit(recorder):
    """One context, no store."""
    everything(recorder, epochs=2)


def fit_adam(recorder):
    """An optimizer derived from one that updates weights one by one."""
    everything(recorder, optimizer=recorder.mx.optimizer.Adam)


def fit_two(recorder):
    """Two contexts with the store of the package, which updates."""
    everything(recorder, contexts=2)


def fit_no_store(recorder):
    """Two contexts that train apart."""
    everything(recorder, contexts=2, kvstore=None)


def store_class(recorder, updates):
    """Return the class of a store that sums."""
    mx = recorder.mx

    class Store(mx.kv.KVStoreBase):
        """Sums of the contexts; the optimizer's steps, too, if ``updates``."""

        type, rank, num_workers = "summing", 0, 1

        def __init__(self):
            self.values, self.updater = {}, None

        @staticmethod
        def is_capable(capability):
            return updates

        def set_optimizer(self, optimizer):
            self.updater = mx.optimizer.get_updater(optimizer)

        def init(self, key, value):
            self.values[key] = value.copy()

        def broadcast(self, key, value, out, priority=0):
            self.values[key] = value.copy()
            for one in out if isinstance(out, list) else [out]:
                self.values[key].copyto(one)

        def pushpull(self, key, value, out=None, priority=0):
            total = value[0].copy()
            for other in value[1:]:
                total += other.as_in_context(total.context)
            if self.updater is not None:
                self.updater(key, total, self.values[key])
                total = self.values[key]
            for one in value if out is None else out:
                total.copyto(one)

    return recorder.watch("store", Store, STORE)


def fit_own_store(recorder):
    """Two contexts and a store of the user's, which sums."""
    everything(recorder, contexts=2, kvstore=store_class(recorder, updates=False)())


def fit_own_updating_store(recorder):
    """Two contexts and a store of the user's, which updates."""
    everything(recorder, contexts=2, kvstore=store_class(recorder, updates=True)())


def bound(recorder, base=None, **settings):
    """Return a bound module with parameters whose methods are recorded."""
    mx = recorder.mx
    module = recorder.watch("module", base or mx.mod.Module, MODULE)(network(mx), context=mx.cpu(), **settings)
    module.bind([("data", (2, 4))], [("softmax_label", (2,))])
    module.init_params(mx.init.One())
    recorder.lines.clear()
    return module


def evaluate(recorder):
    """Score, predict and iterate over predictions, with padding, a number of batches, and without a reset."""
    module, data = bound(recorder), iterator(recorder)
    metric = metric_class(recorder)("mine")
    recorder.lines.clear()
    ends = {"batch_end_callback": recorder.callback("batch"), "score_end_callback": recorder.callback("end")}
    module.score(data, metric, **ends, epoch=3)
    module.score(data, metric, num_batch=1, **ends)
    module.score(data, "acc", num_batch=5, reset=False)
    module.predict(data)
    module.predict(data, num_batch=2, merge_batches=False, always_output_list=True)
    for _ in module.iter_predict(data, num_batch=1):
        recorder.lines.append("loop")
    data.reset()
    for _ in module.iter_predict(data, reset=False):
        recorder.lines.append("loop")


def files(recorder):
    """Files, assignments and another batch size."""
    mx, module = recorder.mx, bound(recorder)
    module.init_optimizer(kvstore=None, optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "net")
        module.save_params(prefix + ".params")
        module.load_params(prefix + ".params")
        module.save_checkpoint(prefix, 1)
        module.save_checkpoint(prefix, 2, save_optimizer_states=True)
        module.load_optimizer_states(prefix + "-0002.states")
    args, aux = module.get_params()
    module.set_params(args, aux)
    module.set_params({"fc1_bias": args["fc1_bias"]}, None, allow_missing=True)
    module.set_params(args, aux, force_init=False)
    batch = mx.io.DataBatch([mx.nd.ones((3, 4))], [mx.nd.zeros(3)])
    module.forward(batch, is_train=False)
    module.forward_backward(batch)
    module.bind([("data", (2, 4))], [("softmax_label", (2,))], force_rebind=True)


def parts_of_batches(recorder):
    """An iterator of the user's that makes its batches from parts: ``iter_next``, ``getdata`` and the others."""
    mx, module = recorder.mx, bound(recorder)

    class Parts(mx.io.DataIter):
        """Two batches."""

        def __init__(self):
            super().__init__(2)
            self.number = 0
            self.provide_data = [mx.io.DataDesc("data", (2, 4))]
            self.provide_label = [mx.io.DataDesc("softmax_label", (2,))]

        def reset(self):
            self.number = 0

        def iter_next(self):
            self.number += 1
            return self.number <= 2

        def getdata(self):
            return [mx.nd.ones((2, 4))]

        def getlabel(self):
            return [mx.nd.zeros(2)]

        def getindex(self):
            return None

        def getpad(self):
            return 0

    data = recorder.watch("iterator", Parts, ITERATOR)()
    module.fit(data, num_epoch=2, batch_end_callback=recorder.callback("batch_end"))
    module.score(data, "acc")
    module.predict(data)


def buckets(recorder):
    """A BucketingModule, two buckets."""
    mx = recorder.mx

    def generate(key):
        net = mx.sym.sum(mx.sym.Variable("data"), axis=1, keepdims=True)
        net = mx.sym.FullyConnected(net, num_hidden=2, name="fc")
        return mx.sym.SoftmaxOutput(net, name="softmax"), ["data"], ["softmax_label"]

    class Sentences(mx.io.DataIter):
        """Batches of both buckets in turn."""

        def __init__(self):
            super().__init__(2)
            self.provide_data = [mx.io.DataDesc("data", (2, 6))]
            self.provide_label = [mx.io.DataDesc("softmax_label", (2,))]
            self.default_bucket_key, self.number = 6, 0

        def reset(self):
            self.number = 0

        def next(self):
            self.number += 1
            if self.number > 3:
                raise StopIteration
            length = 6 if self.number == 1 else 4
            return mx.io.DataBatch(
                [mx.nd.ones((2, length))],
                [mx.nd.zeros(2)],
                pad=0,
                bucket_key=length,
                provide_data=[mx.io.DataDesc("data", (2, length))],
                provide_label=self.provide_label,
            )

    module = recorder.watch("module", mx.mod.BucketingModule, MODULE)(generate, 6, context=mx.cpu())
    data = recorder.watch("iterator", Sentences, ITERATOR)()
    monitor = recorder.watch("monitor", mx.mon.Monitor, MONITOR)(1, pattern="fc_output")
    initializer = recorder.watch("initializer", mx.init.Uniform, INITIALIZER)(0.1)
    recorder.lines.clear()
    metric = metric_class(recorder)("mine")
    recorder.lines.clear()
    module.fit(
        data,
        eval_data=data,
        eval_metric=metric,
        initializer=initializer,
        monitor=monitor,
        num_epoch=1,
        batch_end_callback=recorder.callback("batch_end"),
    )
    module.predict(data, merge_batches=False)


def chain(recorder):
    """A SequentialModule of two modules of the user's."""
    mx = recorder.mx
    first = recorder.watch("first", mx.mod.Module, MODULE)(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc0"), label_names=[], context=mx.cpu()
    )
    second = recorder.watch("second", mx.mod.Module, MODULE)(network(mx), context=mx.cpu())
    module = recorder.watch("module", mx.mod.SequentialModule, MODULE)()
    module.add(first).add(second, take_labels=True, auto_wiring=True)
    data = iterator(recorder, 4, 2)
    metric = metric_class(recorder)("mine")
    recorder.lines.clear()
    module.fit(data, eval_metric=metric, num_epoch=1, initializer=mx.init.Uniform(0.1))
    module.score(data, metric)


SCRIPTS = (
    fit, fit_adam, fit_two, fit_no_store, fit_own_store, fit_own_updating_store, evaluate, files,
    parts_of_batches, buckets, chain,
)  # fmt: skip


def play(mx, script):
    """Return the lines of a script."""
    logging.disable(logging.CRITICAL)
    try:
        recorder = Recorder(mx)
        mx.random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        script(recorder)
        return recorder.lines
    finally:
        logging.disable(logging.NOTSET)
