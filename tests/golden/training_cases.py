"""Cases of whole training runs, as plain code over the API that MXNet 1.9.1 and weftplan share.

``run(mx)`` gets either package and returns ``{key: array}``. Every random number comes from NumPy's ``RandomState``.
"""

import numpy as np

SAMPLES, FEATURES, CLASSES = 46, 6, 4


def data():
    """Return features and labels of a small classification problem."""
    rng = np.random.RandomState(7)
    x = rng.uniform(-1, 1, (SAMPLES, FEATURES)).astype(np.float32)
    y = np.argmax(x @ rng.normal(0, 1, (FEATURES, CLASSES)), axis=1).astype(np.float32)
    return x, y


def perceptron(mx):
    """Return a network of two fully connected layers."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc1")
    net = mx.sym.Activation(net, act_type="tanh", name="act1")
    net = mx.sym.FullyConnected(net, num_hidden=CLASSES, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def convolution(mx):
    """Return a network of convolution, batch normalisation with moving statistics, and pooling."""
    net = mx.sym.Reshape(mx.sym.Variable("data"), shape=(-1, 1, 2, 3))
    # No bias: before a normalisation its gradient is rounding noise, which Adam would amplify to whole steps.
    net = mx.sym.Convolution(net, num_filter=4, kernel=(2, 2), pad=(1, 1), no_bias=True, name="conv1")
    net = mx.sym.BatchNorm(net, fix_gamma=False, name="bn1")
    net = mx.sym.Activation(net, act_type="relu", name="act1")
    net = mx.sym.Pooling(net, kernel=(2, 2), stride=(1, 1), pool_type="max", name="pool1")
    net = mx.sym.FullyConnected(mx.sym.Flatten(net), num_hidden=CLASSES, name="fc2")
    return mx.sym.SoftmaxOutput(net, normalization="batch", name="softmax")


def start_values(mx, symbol, rows):
    """Return (arguments, auxiliary states) that are equal in both packages."""
    rng = np.random.RandomState(3)
    shapes, _, aux_shapes = symbol.infer_shape(data=(rows, FEATURES))
    args = {
        name: mx.nd.array(rng.uniform(-0.6, 0.6, shape).astype(np.float32))
        for name, shape in zip(symbol.list_arguments(), shapes, strict=True)
        if name not in ("data", "softmax_label")
    }
    aux = {
        name: mx.nd.array((np.zeros if "mean" in name else np.ones)(shape).astype(np.float32))
        for name, shape in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True)
    }
    return args, aux


RUNS = {
    "sgd": ("perceptron", "sgd", {"learning_rate": 0.2}, 1, "local"),
    "sgd-momentum-wd-clip": (
        "perceptron",
        "sgd",
        {"learning_rate": 0.3, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.05},
        1,
        "local",
    ),
    "sgd-two-devices-local": ("perceptron", "sgd", {"learning_rate": 0.2, "momentum": 0.9, "wd": 0.01}, 2, "local"),
    "sgd-three-devices-device": ("perceptron", "sgd", {"learning_rate": 0.2, "momentum": 0.9}, 3, "device"),
    "adam": ("perceptron", "adam", {"learning_rate": 0.02, "wd": 0.001}, 1, "local"),
    "adam-two-devices": ("perceptron", "adam", {"learning_rate": 0.02}, 2, "device"),
    "convolution-momentum": ("convolution", "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.001}, 1, "local"),
    "convolution-two-devices-adam": ("convolution", "adam", {"learning_rate": 0.01}, 2, "device"),
    "schedule": ("perceptron", "sgd", {"learning_rate": 0.4, "schedule": True}, 1, "local"),
}


def train(mx, network, optimizer, settings, devices, store):
    """Train for four epochs by Module.fit; return cross-entropies, metrics, parameters and predictions.

    Cross-entropies and metrics are recorded after each batch.
    """
    x, y = data()
    symbol = {"perceptron": perceptron, "convolution": convolution}[network](mx)
    settings = dict(settings)
    if settings.pop("schedule", False):
        settings["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(step=5, factor=0.5, base_lr=0.4)
    args, aux = start_values(mx, symbol, 12)
    batches = mx.io.NDArrayIter(x, y, batch_size=12)
    module = mx.mod.Module(symbol, context=[mx.cpu(i) for i in range(devices)])
    losses, seen = [], []

    def after(param):
        out = module.get_outputs()[0].asnumpy()
        first = param.nbatch * 12
        labels = np.take(y, np.arange(first, first + 12) % SAMPLES).astype(int)
        losses.append(-np.log(out[np.arange(12), labels] + 1e-12).mean())
        seen.append([value for _, value in param.eval_metric.get_name_value()])

    module.fit(
        batches,
        eval_metric=["acc", mx.metric.create("top_k_accuracy", top_k=2), "ce"],
        batch_end_callback=after,
        kvstore=store,
        optimizer=optimizer,
        optimizer_params=settings,
        arg_params=args,
        aux_params=aux,
        num_epoch=4,
    )
    result = {"losses": np.array(losses), "metrics": np.array(seen), "prediction": module.predict(batches).asnumpy()}
    args, aux = module.get_params()
    result.update({f"param:{name}": value.asnumpy() for name, value in {**args, **aux}.items()})
    return result


STEPS = {
    "nag": ("nag", {"learning_rate": 0.2, "momentum": 0.9, "clip_gradient": 0.7}),
    "nag-plain": ("nag", {"learning_rate": 0.2, "wd": 0.1}),
    "adagrad": ("adagrad", {"learning_rate": 0.2, "wd": 0.1, "clip_gradient": 0.7, "eps": 1e-3}),
    "rmsprop": ("rmsprop", {"learning_rate": 0.05, "wd": 0.1, "gamma1": 0.8, "clip_gradient": 0.7}),
    "rmsprop-centered": ("rmsprop", {"wd": 0.1, "gamma2": 0.5, "centered": True, "clip_weights": 0.4}),
    "lars": ("lars", {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.1, "eta": 0.3, "clip_gradient": 0.7}),
    "lars-plain": ("lars", {"learning_rate": 0.5, "wd": 0.1, "eta": 0.3, "eps": 0.01}),
    "adadelta": ("adadelta", {"rho": 0.8, "wd": 0.1, "epsilon": 1e-3, "clip_gradient": 0.7}),
}


def steps(mx):
    """Return a weight and a bias after each of six steps of optimizers without their own kernel."""
    result = {}
    for key, (name, settings) in STEPS.items():
        rng = np.random.RandomState(13)
        optimizer = mx.optimizer.create(
            name, rescale_grad=0.5, param_idx2name={0: "fc_weight", 1: "fc_bias"}, **settings
        )
        update = mx.optimizer.get_updater(optimizer)
        weights = [mx.nd.array(rng.normal(size=(2, 3))), mx.nd.array(rng.normal(size=3))]
        seen = []
        for _ in range(6):
            for index, weight in enumerate(weights):
                update(index, mx.nd.array(rng.normal(0, 2, weight.shape)), weight)
            seen.append(np.concatenate([weight.asnumpy().ravel() for weight in weights]))
        result[key] = np.array(seen)
    return result


def schedules(mx):
    """Return each schedule's learning rate at updates 1 to 60."""
    make = mx.lr_scheduler
    every = {
        "factor": make.FactorScheduler(step=7, factor=0.6, base_lr=0.5, stop_factor_lr=0.05),
        "factor-warmup": make.FactorScheduler(
            step=10, factor=0.5, base_lr=0.4, warmup_steps=8, warmup_begin_lr=0.1, warmup_mode="linear"
        ),
        "constant-warmup": make.FactorScheduler(
            step=10, factor=0.5, base_lr=0.4, warmup_steps=8, warmup_begin_lr=0.1, warmup_mode="constant"
        ),
        "multi": make.MultiFactorScheduler(step=[5, 9, 30], factor=0.3, base_lr=1.0),
        "multi-warmup": make.MultiFactorScheduler(step=[5, 9, 30], factor=0.3, base_lr=1.0, warmup_steps=6),
        "poly": make.PolyScheduler(max_update=40, base_lr=0.3, pwr=2, final_lr=0.01),
        "poly-warmup": make.PolyScheduler(max_update=40, base_lr=0.3, pwr=3, warmup_steps=5, warmup_begin_lr=0.02),
        "cosine": make.CosineScheduler(max_update=40, base_lr=0.3, final_lr=0.01),
        "cosine-warmup": make.CosineScheduler(max_update=40, base_lr=0.3, final_lr=0.01, warmup_steps=5),
    }
    return {name: np.array([schedule(n) for n in range(1, 61)]) for name, schedule in every.items()}


def iterators(mx):
    """Return epoch, padding, data and label of the batches of three epochs, by handling of the last batch."""
    x = np.arange(22, dtype=np.float32).reshape(11, 2)
    y = np.arange(11, dtype=np.float32) * 10
    result = {}
    for handle in ("pad", "discard", "roll_over"):
        it = mx.io.NDArrayIter(x, y, batch_size=4, last_batch_handle=handle)
        rows = []
        for epoch in range(3):
            for batch in it:
                rows.append([epoch, batch.pad, *batch.data[0].asnumpy().ravel(), *batch.label[0].asnumpy()])
            it.reset()
        result[handle] = np.array(rows)
    return result


METRICS = (
    ("acc", {}),
    ("top_k_accuracy", {"top_k": 3}),
    ("ce", {}),
    ("mse", {}),
    ("rmse", {}),
    ("mae", {}),
    ("nll_loss", {}),
    ("perplexity", {"ignore_label": None}),
    ("perplexity", {"ignore_label": 2}),
    ("f1", {}),
    ("f1", {"average": "micro"}),
    ("mcc", {}),
    ("mcc", {"average": "micro"}),
    ("pcc", {}),
    ("pearsonr", {}),
    ("pearsonr", {"average": "micro"}),
)


def metrics(mx):
    """Return every metric's value after each of three batches."""
    rng = np.random.RandomState(11)
    result = {}
    for name, settings in METRICS:
        metric = mx.metric.create(name, **settings)
        values = []
        for rows in (5, 8, 3):
            if name in ("mse", "rmse", "mae", "pearsonr"):
                label, pred = rng.normal(size=(rows, 2)), rng.normal(size=(rows, 2))
            else:
                classes = 2 if name in ("f1", "mcc") else 6
                pred = rng.dirichlet(np.ones(classes), rows)
                label = rng.randint(0, classes, rows)
            metric.update([mx.nd.array(label)], [mx.nd.array(pred)])
            values.append(metric.get()[1])
        result["-".join([name, *map(str, settings.values())]) + f":{metric.get()[0]}"] = np.array(values)
    return result


LABEL_SHAPES = {"N": (6,), "N1": (6, 1), "NC": (6, 3), "NT": (6, 4)}
PREDICTIONS = {**LABEL_SHAPES, "N2": (6, 2), "NCT": (6, 3, 4)}


def label_shapes(mx):
    """Return every metric's values after each of two batches, by shape of labels and shape of predictions.

    The third axis is for arrays alone and in a list. A shape that the library refuses has the value infinity.
    """
    result = {}
    for name, settings in (*METRICS, ("loss", {}), ("torch", {}), ("caffe", {})):
        values = np.full((len(LABEL_SHAPES), len(PREDICTIONS), 2, 2), np.inf)
        for where in np.ndindex(values.shape[:3]):
            rng = np.random.RandomState(3)
            metric = mx.metric.create(name, **settings)
            shapes = list(LABEL_SHAPES.values())[where[0]], list(PREDICTIONS.values())[where[1]]
            try:
                for batch in range(2):
                    label, pred = rng.randint(0, 2, shapes[0]), rng.uniform(0.05, 1, shapes[1])
                    arrays = mx.nd.array(label), mx.nd.array(pred)
                    metric.update(*([array] if where[2] else array for array in arrays))
                    values[(*where, batch)] = metric.get()[1]
            except Exception:
                pass
        result["-".join([name, *map(str, settings.values())])] = values
    return result


INITIALIZERS = {
    "uniform": ("Uniform", {"scale": 0.3}),
    "normal": ("Normal", {"sigma": 0.2}),
    "xavier": ("Xavier", {}),
    "xavier-in": ("Xavier", {"factor_type": "in", "magnitude": 2.34}),
    "xavier-gaussian-out": ("Xavier", {"rnd_type": "gaussian", "factor_type": "out", "magnitude": 2}),
    "msra": ("MSRAPrelu", {}),
    "msra-in": ("MSRAPrelu", {"factor_type": "in", "slope": 0.1}),
    "zero": ("Zero", {}),
    "one": ("One", {}),
    "constant": ("Constant", {"value": 0.7}),
}
SHAPES = {"fc_weight": (300, 200), "conv_weight": (64, 32, 5, 5)}


def initializers(mx):
    """Return mean, standard deviation, minimum and maximum of each initializer's weights.

    Constant vectors are returned in full.
    """
    result = {}
    mx.random.seed(5)
    for key, (name, settings) in INITIALIZERS.items():
        rule = getattr(mx.init, name)(**settings)
        for param, shape in SHAPES.items():
            array = mx.nd.zeros(shape)
            rule(mx.init.InitDesc(param), array)
            values = array.asnumpy().astype(np.float64)
            result[f"{key}:{param}"] = np.array([values.mean(), values.std(), values.min(), values.max()])
        fixed = []
        for param in ("fc_bias", "bn_gamma", "bn_beta"):
            array = mx.nd.zeros((3,)) + 0.5
            rule(mx.init.InitDesc(param), array)
            fixed.append(array.asnumpy())
        result[f"{key}:fixed"] = np.array(fixed)
    return result


def shaped(mx):
    """Return the weights of initializers for specific shapes."""
    result = {}
    for name, settings, shape in (
        ("Bilinear", {}, (2, 3, 4, 4)),
        ("Bilinear", {}, (1, 2, 5, 5)),
        ("LSTMBias", {"forget_bias": 2.5}, (12,)),
    ):
        array = mx.nd.zeros(shape)
        getattr(mx.init, name)(**settings)(mx.init.InitDesc("x_weight"), array)
        result[f"{name}{shape}"] = array.asnumpy()
    return result


def orders(mx):
    """Return what iterators, cells and initializers order or nest: inputs by name, states, biases of gates."""
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4, dtype=np.float32)
    labels = {"type_label": y, "age_label": y + 10, "_label": y + 20}
    batch = next(mx.io.NDArrayIter({"z": x, "a": x + 50}, labels, 2))
    result = {f"label {k}": array.asnumpy() for k, array in enumerate(batch.label)}
    result |= {f"data {k}": array.asnumpy() for k, array in enumerate(batch.data)}
    many = next(mx.io.NDArrayIter([x + k for k in range(12)], None, 2))
    result["eleven arrays and more"] = np.array([array.asnumpy()[0, 0] for array in many.data])
    for mode in ("lstm", "gru", "rnn_relu"):
        for both in (False, True):
            cell = mx.rnn.FusedRNNCell(2, 2, mode, both, forget_bias=1.5, prefix="f_")
            size = {"lstm": 4, "gru": 3}.get(mode, 1) * 2 * (3 + 2 + 2) * (1 + both)
            size += {"lstm": 4, "gru": 3}.get(mode, 1) * 2 * (2 * (1 + both) + 2 + 2) * (1 + both)
            array = mx.nd.zeros((size,))
            rule = mx.init.FusedRNN(mx.init.Zero(), 2, 2, mode, both, 1.5)
            rule(mx.init.InitDesc("f_weight"), array)
            for name, value in cell.unpack_weights({"f_parameters": array}).items():
                if name.endswith("bias"):
                    result[f"{mode} {both} {name}"] = value.asnumpy()

    class Biases(mx.init.Zero):
        def _init_bias(self, name, arr):
            arr[:] = 7

    rule = mx.init.FusedRNN(None, 2, 1, "lstm")
    array = mx.nd.zeros((56,))
    rule(mx.init.InitDesc("f_weight", global_init=Biases()), array)
    result["biases of the network's initializer"] = array.asnumpy()[-16:]
    return result


def nests(mx):
    """Return the nested structure of the states that ``unroll`` returns, as the lengths of its levels."""

    def shape(states):
        return [len(states)] + [len(s) if isinstance(s, list) else 0 for s in states]

    def both(k):
        return mx.rnn.BidirectionalCell(
            mx.rnn.LSTMCell(2, prefix=f"l{k}_"), mx.rnn.GRUCell(2, prefix=f"r{k}_"), output_prefix=f"b{k}_"
        )

    stack = mx.rnn.SequentialRNNCell()
    stack.add(mx.rnn.LSTMCell(2, prefix="first_"))
    stack.add(both(1))
    cells = {"pair": both(0), "stack": stack, "lstm": mx.rnn.LSTMCell(2)}
    cells["residual"] = mx.rnn.ResidualCell(mx.rnn.GRUCell(2, prefix="residual_"))
    cells["unfused"] = mx.rnn.FusedRNNCell(2, 2, "lstm", bidirectional=True, prefix="u_").unfuse()
    inputs = [mx.sym.var(f"t{k}") for k in range(3)]
    return {name: np.array(shape(cell.unroll(3, inputs)[1])) for name, cell in cells.items()}


def late_rates(mx):
    """Return rates after the end of schedules, with a warm-up that is longer than the schedule, too."""
    schedules = {
        "poly": mx.lr_scheduler.PolyScheduler(max_update=3, base_lr=1.0, warmup_steps=5),
        "cosine": mx.lr_scheduler.CosineScheduler(max_update=3, base_lr=1.0, warmup_steps=5),
        "poly ended": mx.lr_scheduler.PolyScheduler(max_update=6, base_lr=1.0, final_lr=0.25, warmup_steps=2),
        "cosine ended": mx.lr_scheduler.CosineScheduler(max_update=6, base_lr=1.0, final_lr=0.25, warmup_steps=2),
        "factor": mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=1.0, warmup_steps=5),
        "multi": mx.lr_scheduler.MultiFactorScheduler(step=[2, 4], factor=0.5, base_lr=1.0, warmup_steps=6),
    }
    schedules |= {
        "poly at its end": mx.lr_scheduler.PolyScheduler(max_update=4, base_lr=1.0, pwr=1, final_lr=0.5),
        "cosine at its end": mx.lr_scheduler.CosineScheduler(max_update=4, base_lr=1.0),
        "factor stopped": mx.lr_scheduler.FactorScheduler(step=1, factor=0.1, stop_factor_lr=0.02, base_lr=1.0),
        "multi at its end": mx.lr_scheduler.MultiFactorScheduler(step=[1, 3, 4], factor=0.5, base_lr=1.0),
    }
    return {name: np.array([rate(k) for k in range(1, 12)]) for name, rate in schedules.items()}


def scalars(mx):
    """Return gradients of a split to scalars."""
    result = {}
    for op, count in (("SliceChannel", {"num_outputs": 3}), ("split_v2", {"indices_or_sections": 3})):
        for req in ("write", "add") if op == "SliceChannel" else ("write",):  # MXNet's split_v2 never adds
            net = getattr(mx.sym, op)(mx.sym.var("x"), axis=0, squeeze_axis=True, **count)
            grad = mx.nd.ones((3,))
            executor = net.bind(mx.cpu(), {"x": mx.nd.array([1, 2, 3])}, {"x": grad}, req)
            outputs = executor.forward(is_train=True)
            executor.backward([mx.nd.array([k + 5.0]).reshape(out.shape) for k, out in enumerate(outputs)])
            result[f"{op} {req}"] = grad.asnumpy()
    return result


def run(mx):
    """Return the results of all groups, by ``group/key``."""
    result = {}
    for name, how in RUNS.items():
        result.update({f"train/{name}/{key}": value for key, value in train(mx, *how).items()})
    for group in (
        schedules,
        iterators,
        metrics,
        label_shapes,
        initializers,
        shaped,
        steps,
        orders,
        nests,
        late_rates,
        scalars,
    ):
        result.update({f"{group.__name__}/{key}": value for key, value in group(mx).items()})
    return result
