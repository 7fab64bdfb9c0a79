"""Peer of ``bench_zoo.py``: exports networks of MXNet's Gluon with random weights, and what MXNet computes of them.

    MXNET_PYTHON bench/peers/zoo.py FOLDER NAME…

For each network the files ``NAME-symbol.json`` and ``NAME-0000.params`` as ``HybridBlock.export`` writes them, and
``NAME.npz`` with the input, the outputs of inference, and the gradients of all parameters from a training step of the
symbol, in which dropout is switched off. ``--list`` prints the names.
"""

import json
import re
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision


def _zoo():
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            vision.get_model("?")
        except ValueError as error:
            said.write(str(error))
    return sorted(set(re.findall(r"^\s*([a-z0-9_.]+)\s*$", said.getvalue(), re.M)))


class _Recurrent(mx.gluon.HybridBlock):
    """Words, a recurrent layer, scores of words."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer, self.score = nn.Embedding(50, 12), layer, nn.Dense(50, flatten=False)

    def hybrid_forward(self, F, x):
        return self.score(self.layer(self.embed(x)))


def _layers(*parts):
    net = nn.HybridSequential()
    net.add(*parts)
    return net


WORDS, IMAGE = (7, 3), (2, 6, 18, 18)
OTHERS = {
    "lstm": (lambda: _Recurrent(rnn.LSTM(16, 2)), WORDS),
    "lstm_both_ways": (lambda: _Recurrent(rnn.LSTM(16, 2, bidirectional=True)), WORDS),
    "lstm_batch_first": (lambda: _Recurrent(rnn.LSTM(16, layout="NTC")), (3, 7)),
    "gru": (lambda: _Recurrent(rnn.GRU(16, 2)), WORDS),
    "rnn_relu": (lambda: _Recurrent(rnn.RNN(16, 2, activation="relu")), WORDS),
    "rnn_tanh": (lambda: _Recurrent(rnn.RNN(16, activation="tanh", bidirectional=True)), WORDS),
    "norms": (
        lambda: _layers(
            nn.Conv2D(8, 3), nn.InstanceNorm(), nn.GroupNorm(4), nn.LayerNorm(), nn.BatchNorm(scale=False), nn.Dense(5)
        ),
        IMAGE,
    ),
    "activations": (
        lambda: _layers(
            nn.Conv2D(8, 3),
            nn.PReLU(),
            nn.Conv2D(8, 3),
            nn.ELU(),
            nn.Conv2D(8, 3),
            nn.SELU(),
            nn.Conv2D(8, 3),
            nn.GELU(),
            nn.Conv2D(8, 3),
            nn.Swish(),
            nn.LeakyReLU(0.1),
            nn.Dense(5, activation="sigmoid"),
            nn.Dense(5, activation="softrelu"),
            nn.Dense(4, activation="softsign"),
        ),
        IMAGE,
    ),
    "transposed": (
        lambda: _layers(
            nn.Conv2DTranspose(8, 4, 2, 1), nn.BatchNorm(), nn.Conv2DTranspose(3, 3, 2, 1, output_padding=1)
        ),
        IMAGE,
    ),
    "one_axis": (
        lambda: _layers(
            nn.Conv1D(8, 3, padding=1),
            nn.MaxPool1D(),
            nn.Conv1DTranspose(4, 3),
            nn.AvgPool1D(),
            nn.GlobalMaxPool1D(),
            nn.Dense(3),
        ),
        (2, 5, 30),
    ),
    "three_axes": (
        lambda: _layers(
            nn.Conv3D(8, 3, padding=1),
            nn.MaxPool3D(),
            nn.Conv3DTranspose(4, 3),
            nn.AvgPool3D(),
            nn.GlobalAvgPool3D(),
            nn.Dense(3),
        ),
        (2, 3, 8, 8, 8),
    ),
    "pooling": (
        lambda: _layers(
            nn.ReflectionPad2D(1),
            nn.Conv2D(8, 3, groups=2, dilation=2),
            nn.AvgPool2D(3, 2, 1, ceil_mode=True),
            nn.MaxPool2D(3, 2, ceil_mode=True),
            nn.AvgPool2D(2, 1, 1, count_include_pad=False),
            nn.HybridLambda(lambda F, x: F.L2Normalization(x)),
            nn.Flatten(),
            nn.Dense(4),
        ),
        IMAGE,
    ),
}


def _made(name):
    """(network, input)."""
    random = np.random.RandomState(3)
    if name in OTHERS:
        make, shape = OTHERS[name]
        words = len(shape) == 2
        x = random.randint(0, 50, shape) if words else random.standard_normal(shape)
        return make(), x.astype(np.float32)
    side = 299 if name.startswith("inception") else 64 if name.startswith(("resnet", "mobilenet")) else 224
    return vision.get_model(name), random.standard_normal((2, 3, side, side)).astype(np.float32)


def _export(folder, name):
    mx.random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - what MXNet draws from
    net, x = _made(name)
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize()
    data = mx.nd.array(x)
    net(data)
    net.export(str(folder / name))
    path = folder / f"{name}-symbol.json"
    symbol, args, aux = mx.model.load_checkpoint(str(folder / name), 0)
    random = np.random.RandomState(5)
    for key in aux:  # moving statistics of a network that has never been trained hide mistakes
        aux[key][:] = (
            random.uniform(0.5, 1.5, aux[key].shape)
            if key.endswith("var")
            else random.uniform(-0.1, 0.1, aux[key].shape)
        )
    mx.model.save_checkpoint(str(folder / name), 0, symbol, args, aux)
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        if node["op"] == "Dropout":
            node["attrs"]["p"] = "0"
    path.write_text(json.dumps(graph))
    symbol = mx.sym.load(str(path))
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=x.shape)
    executor.copy_params_from(args, aux)
    outputs = [out.asnumpy() for out in executor.forward(is_train=False, data=data)]
    found = {"data": x, **{f"output{k}": out for k, out in enumerate(outputs)}}
    if name not in OTHERS:  # the plan in whole mebibytes: at a batch of 16 a sixteenth of that is exact enough
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=(16, 3, *2 * (max(x.shape[2], 224),)))
        found["planned"] = (int(re.search(r"Total (\d+) MB allocated", executor.debug_str()).group(1)) << 20) // 16
    requests = dict.fromkeys(symbol.list_arguments(), "write")
    requests["data"] = "null" if len(x.shape) == 2 else "write"
    for kind, dtype in (("grad", "float32"), ("exact", "float64")):
        dtypes = dict.fromkeys([*requests, *symbol.list_auxiliary_states()], dtype)
        try:
            executor = symbol.simple_bind(mx.cpu(), grad_req=requests, type_dict=dtypes, data=x.shape)
            executor.copy_params_from(args, aux)
            executor.forward(is_train=True, data=data.astype(dtype))
            for k, out in enumerate(executor.outputs):
                found.setdefault(f"head{k}", random.standard_normal(out.shape).astype(np.float32))
            executor.backward([mx.nd.array(found[f"head{k}"], dtype=dtype) for k in range(len(executor.outputs))])
            found.update(
                {f"{kind}:{key}": grad.asnumpy() for key, grad in executor.grad_dict.items() if grad is not None}
            )
        except (mx.base.MXNetError, RuntimeError):  # an operator that MXNet does not have in float64
            if kind == "grad":
                raise
    np.savez(folder / f"{name}.npz", **found)


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(*_zoo(), *OTHERS)
    else:
        for name in sys.argv[2:]:
            try:
                _export(Path(sys.argv[1]), name)
                print(name, "ok", flush=True)
            except Exception as error:
                print(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
