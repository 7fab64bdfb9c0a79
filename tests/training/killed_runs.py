"""A short run of ``fit`` that can be stopped after any batch, and a comparison of two runs."""

import random as python_random

import numpy as np

import weftplan as mx

EPOCHS = 3


BATCHES = 5


class Killed(BaseException):
    """Raised to stop a run. The package catches no BaseException, so this acts like the death of the process."""


def network():
    """Return a classifier with batch normalization (auxiliary states) and dropout (random numbers)."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="fc1")
    net = mx.sym.BatchNorm(net, fix_gamma=False, name="bn")
    net = mx.sym.Dropout(mx.sym.Activation(net, act_type="relu", name="act"), p=0.3, name="drop")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")


def data():
    """Return an iterator over five batches of eight samples; each reset shuffles the samples."""
    rng = np.random.default_rng(2)
    return mx.io.NDArrayIter(rng.random((40, 4)), rng.integers(0, 3, 40), batch_size=8, shuffle=True)


class Plain(mx.io.DataIter):
    """An iterator that gives the batches of :func:`data` and cannot save its position."""

    def __init__(self):
        super().__init__(8)
        self._source = data()
        self.provide_data, self.provide_label = self._source.provide_data, self._source.provide_label

    def reset(self):
        self._source.reset()

    def next(self):
        return self._source.next()


SETTINGS = {
    "sgd": {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9}},
    "nadam": {"optimizer": "nadam", "optimizer_params": {"learning_rate": 0.01}},
    "schedule": {
        "optimizer": "adam",
        "optimizer_params": lambda: {"lr_scheduler": mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.05)},
    },
    "lbsgd": {
        "optimizer": "lbsgd",
        "optimizer_params": {"learning_rate": 0.01, "momentum": 0.9, "batch_scale": 3, "updates_per_epoch": 5},
    },
}


def run(prefix=None, *, stop=None, seed=3, make=data, devices=1, optimizer="sgd", metric=("acc", "ce"), **settings):
    """Train with ``fit`` and return (weights by name, last callback record, two numbers drawn afterwards).

    The record holds the epoch, the batch number, the metric values and a random number; it is None if no batch ran.
    Returns None if the run was stopped after batch ``stop``, which is counted from the beginning of the run.
    """
    mx.random.seed(seed)
    python_random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what a program may do
    module = mx.mod.Module(
        network(),
        context=[mx.cpu(i) for i in range(devices)],
        compression_params=settings.pop("compression_params", None),
    )
    seen = []

    def after(param):
        seen.append((param.epoch, param.nbatch, *param.eval_metric.get_name_value(), python_random.random()))
        np.random.random()  # noqa: NPY002
        if stop is not None and param.epoch * BATCHES + param.nbatch == stop:
            raise Killed

    chosen = dict(SETTINGS[optimizer])
    if callable(chosen["optimizer_params"]):
        chosen["optimizer_params"] = chosen["optimizer_params"]()
    chosen = {"kvstore": "device", **chosen, **settings}
    try:
        module.fit(
            make(),
            num_epoch=chosen.pop("num_epoch", EPOCHS),
            eval_metric=list(metric),
            initializer=mx.init.Xavier(),
            batch_end_callback=after,
            checkpoint=prefix,
            **chosen,
        )
    except Killed:
        return None
    args, aux = module.get_params()
    by_name = {name: value.asnumpy() for name, value in {**args, **aux}.items()}
    return by_name, seen[-1] if seen else None, (mx.nd.random.uniform().asscalar(), np.random.random())  # noqa: NPY002


def assert_same_run(left, right):
    """Check that two results of :func:`run` have the same weight bits, records and random numbers."""
    assert left[0].keys() == right[0].keys()
    for name, value in left[0].items():
        np.testing.assert_array_equal(value, right[0][name], err_msg=name)
    assert left[1:] == right[1:]
