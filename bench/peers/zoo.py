"""Peer of ``bench_zoo.py``: exports networks of MXNet's Gluon with random weights, and the values that MXNet computes.

    MXNET_PYTHON bench/peers/zoo.py FOLDER NAME…
    MXNET_PYTHON bench/peers/zoo.py --files SHAPES FOLDER NAME…
    MXNET_PYTHON bench/peers/zoo.py --again FOLDER NAME…

For each network it writes ``NAME-symbol.json`` and ``NAME-0000.params`` as ``HybridBlock.export`` does, and
``NAME.npz``. The last file has the inputs; the outputs of inference without MXNet's fused operators, in float32 and,
if MXNet can, in float64; the input of each final softmax, because a softmax may hide differences; the gradients of a
training step without dropout, except those of PReLU slopes, which MXNet computes wrongly; names and inferred shapes.

With ``--files`` the symbols are already in FOLDER; missing parameters are drawn at random. ``SHAPES`` is a JSON
file: ``{NAME: {"run": shapes of inputs, "plan": shapes of inputs}}``. With ``--again`` it runs
``NAME-again-symbol.json`` and ``.params``, which weftplan wrote, and reports whether the outputs have the same bits.
``--list`` prints the names.
"""

import contextlib
import json
import os
import re
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision


def _zoo():
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            vision.get_model("?")
        except ValueError as error:
            said.write(str(error))
    return sorted(set(re.findall(r"^\s*([a-z0-9_.]+)\s*$", said.getvalue(), re.M)))


class _Recurrent(mx.gluon.HybridBlock):
    """A language model: embedded words, a recurrent layer, scores of words."""

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


def _network_and_input(name):
    """Return (network, random input for it)."""
    random = np.random.RandomState(3)
    if name in OTHERS:
        make, shape = OTHERS[name]
        words = len(shape) == 2
        x = random.randint(0, 50, shape) if words else random.standard_normal(shape)
        return make(), x.astype(np.float32)
    side = 299 if name.startswith("inception") else 64 if name.startswith(("resnet", "mobilenet")) else 224
    return vision.get_model(name), random.standard_normal((2, 3, side, side)).astype(np.float32)


def _export(folder, name):
    """Write a network's pair of files, and the values that MXNet computes."""
    mx.random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - MXNet draws from this generator
    net, x = _network_and_input(name)
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize()
    net(mx.nd.array(x))
    net.export(str(folder / name))
    symbol, args, aux = mx.model.load_checkpoint(str(folder / name), 0)
    random = np.random.RandomState(5)
    _draw_statistics(aux, random)  # the initial statistics would hide mistakes
    mx.model.save_checkpoint(str(folder / name), 0, symbol, args, aux)
    plan = None if name in OTHERS else {"data": (1, 3, *2 * (max(x.shape[2], 224),))}
    _compute(folder, name, {"data": x}, plan, random)


def _draw_statistics(aux, random):
    for key in aux:
        low, high = (0.5, 1.5) if key.endswith("var") else (-0.1, 0.1)
        aux[key][:] = random.uniform(low, high, aux[key].shape)


def _compute_from_symbol(folder, name, shapes):
    """Write the values that MXNet computes for a symbol file; if it has no parameter file, write random parameters."""
    random = np.random.RandomState(5)
    symbol = mx.sym.load(str(folder / f"{name}-symbol.json"))
    run = {key: tuple(shape) for key, shape in shapes["run"].items()}
    actual, _, of_states = symbol.infer_shape(**run)
    sizes = dict(zip(symbol.list_arguments(), actual, strict=True))
    states = dict(zip(symbol.list_auxiliary_states(), of_states, strict=True))
    if not (folder / f"{name}-0000.params").exists():
        args = {}
        for key, shape in sizes.items():
            if key not in run and not key.endswith("label"):
                scale = np.sqrt(2 / max(1, np.prod(shape[1:]))) if len(shape) > 1 else 0.1
                args[key] = mx.nd.array(random.standard_normal(shape) * scale + key.endswith("gamma"))
        aux = {key: mx.nd.zeros(shape) for key, shape in states.items()}
        _draw_statistics(aux, random)
        text = (folder / f"{name}-symbol.json").read_bytes()
        mx.model.save_checkpoint(str(folder / name), 0, symbol, args, aux)
        (folder / f"{name}-symbol.json").write_bytes(text)  # restore the published text
    _, args, aux = mx.model.load_checkpoint(str(folder / name), 0)
    inputs = {}
    for key, shape in sizes.items():
        if key.endswith("label"):
            inputs[key] = random.randint(0, 2, shape).astype(np.float32)
        elif key not in args:
            inputs[key] = random.standard_normal(shape).astype(np.float32)
    _compute(folder, name, inputs, shapes["plan"], random)


def _without_dropout(path):
    """Return the symbol in ``path`` with dropout switched off."""
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        if node["op"] == "Dropout":
            next(node[key] for key in ("attrs", "param", "attr") if node.get(key))["p"] = "0"
    return mx.sym.load_json(json.dumps(graph))


def _slopes(path):
    """Return the names of the PReLU slopes in a symbol file."""
    nodes = json.loads(path.read_text())["nodes"]
    return {
        nodes[node["inputs"][1][0]]["name"] for node in nodes if node["op"] == "LeakyReLU" and len(node["inputs"]) > 1
    }


def _scores(symbol):
    """Return the output names of the inputs of final softmaxes."""
    graph = json.loads(symbol.tojson())
    nodes = graph["nodes"]
    ends = [nodes[head[0]] for head in graph["heads"]]
    names = [nodes[end["inputs"][0][0]]["name"] for end in ends if end["op"] in ("SoftmaxOutput", "softmax")]
    return [f"{name}_output" for name in names if f"{name}_output" in symbol.get_internals().list_outputs()]


def _infer(symbol, args, aux, inputs, *, fused=False, dtype="float32"):
    """Return the outputs of inference and the inputs of final softmaxes, with or without MXNet's fused operators."""
    os.environ["MXNET_SUBGRAPH_BACKEND"] = "MKLDNN" if fused else "NONE"
    inner = symbol.get_internals()
    names = inner.list_outputs()[::-1]  # of equal names take the last
    symbol = mx.sym.Group([symbol, *(inner[len(names) - 1 - names.index(key)] for key in _scores(symbol))])
    dtypes = dict.fromkeys([*symbol.list_arguments(), *symbol.list_auxiliary_states()], dtype)
    sizes = {key: value.shape for key, value in inputs.items()}
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", type_dict=dtypes, **sizes)
    executor.copy_params_from(args, aux, allow_extra_params=True)
    outputs = [out.asnumpy() for out in executor.forward(is_train=False, **_arrays(inputs, dtype))]
    os.environ["MXNET_SUBGRAPH_BACKEND"] = "MKLDNN"
    return outputs


def _arrays(inputs, dtype="float32"):
    return {key: mx.nd.array(value, dtype=dtype) for key, value in inputs.items()}


def _planned(symbol, shapes):
    """Return MXNet's planned bytes per sample.

    MXNet reports whole mebibytes, so the batch is enlarged until there are 1,000 of them or it is 4,096.
    """
    for batch in (16, 64, 256, 1024, 4096):
        sizes = {key: (batch * shape[0], *shape[1:]) for key, shape in shapes.items()}
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", **sizes)
        total = int(re.search(r"Total (\d+) MB allocated", executor.debug_str()).group(1))
        if total >= 1000:
            break
    return (total << 20) // batch


def _compute(folder, name, inputs, plan, random):
    """Compute the network of ``NAME-symbol.json`` and its parameter file with MXNet, and write ``NAME.npz``."""
    path = folder / f"{name}-symbol.json"
    symbol, args, aux = mx.model.load_checkpoint(str(folder / name), 0)
    outputs = _infer(symbol, args, aux, inputs)
    for k, (own, fused) in enumerate(zip(outputs, _infer(symbol, args, aux, inputs, fused=True), strict=True)):
        apart = np.abs(own - fused).max(initial=0) / (np.abs(own).max(initial=0) or 1)
        if not apart <= 1e-4:  # MXNet 1.9.1 does so if it fuses a sum into a convolution
            print(f"{name}: fused operators change output {k} by {apart:.1e} of its largest value", flush=True)
    by_name = {f"input:{key}": value for key, value in inputs.items()}
    by_name.update({f"output{k}": out for k, out in enumerate(outputs)})
    with contextlib.suppress(mx.base.MXNetError, RuntimeError):  # MXNet lacks an operator in float64
        precise = _infer(symbol, args, aux, inputs, dtype="float64")
        by_name.update({f"precise{k}": out for k, out in enumerate(precise)})
    by_name["scores"] = json.dumps(_scores(symbol))
    names = (symbol.list_arguments(), symbol.list_auxiliary_states(), symbol.list_outputs())
    shapes = symbol.infer_shape(**{key: value.shape for key, value in inputs.items()})
    by_name["interface"] = json.dumps([names, [shapes[0], shapes[2], shapes[1]]])
    if plan is not None:
        by_name["planned"], by_name["planned_shapes"] = _planned(symbol, plan), json.dumps(plan)
    symbol = _without_dropout(path)
    words = any(len(value.shape) == 2 for value in inputs.values()) and name in OTHERS
    requests = dict.fromkeys(symbol.list_arguments(), "write")
    requests.update({key: "null" for key in inputs if words or key.endswith("label")})
    sizes = {key: value.shape for key, value in inputs.items()}
    slopes = _slopes(path)  # MXNet computes wrong gradients of these, from overwritten heads
    for kind, dtype in (("grad", "float32"), ("exact", "float64")):
        dtypes = dict.fromkeys([*requests, *symbol.list_auxiliary_states()], dtype)
        try:
            executor = symbol.simple_bind(mx.cpu(), grad_req=requests, type_dict=dtypes, **sizes)
            executor.copy_params_from(args, aux, allow_extra_params=True)
            executor.forward(is_train=True, **_arrays(inputs, dtype))
            for k, out in enumerate(executor.outputs):
                by_name.setdefault(f"head{k}", random.standard_normal(out.shape).astype(np.float32))
            executor.backward([mx.nd.array(by_name[f"head{k}"], dtype=dtype) for k in range(len(executor.outputs))])
            gradients = {key: grad.asnumpy() for key, grad in executor.grad_dict.items() if grad is not None}
            by_name.update({f"{kind}:{key}": value for key, value in gradients.items() if key not in slopes})
        except (mx.base.MXNetError, RuntimeError):  # MXNet lacks an operator in float64, or its gradient
            if kind == "grad" and name in OTHERS:
                raise
    np.savez(folder / f"{name}.npz", **by_name)


def _again(folder, name):
    """Compute the files that weftplan wrote; raise a ValueError if an output has other bits."""
    wanted = np.load(folder / f"{name}.npz")
    symbol, args, aux = mx.model.load_checkpoint(str(folder / f"{name}-again"), 0)
    inputs = {key[6:]: wanted[key] for key in wanted.files if key.startswith("input:")}
    outputs = _infer(symbol, args, aux, inputs)
    for k, out in enumerate(outputs):
        if not np.array_equal(out, wanted[f"output{k}"], equal_nan=True):
            raise ValueError(f"output {k} of the saved files has other bits")


def main(words):
    """Export the named networks and compute MXNet's values; for the options see the module's docstring."""
    if words[0] == "--list":
        print(*_zoo(), *OTHERS)
        return
    work = _export
    if words[0] == "--again":
        work, words = _again, words[1:]
    elif words[0] == "--files":
        shapes, words = json.loads(Path(words[1]).read_text()), words[2:]

        def work(folder, name):
            _compute_from_symbol(folder, name, shapes[name])

    for name in words[1:]:
        try:
            work(Path(words[0]), name)
            print(name, "ok", flush=True)
        except Exception as error:
            print(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
