"""Write the symbol JSON of eleven networks as MXNet 1.9.1 itself builds them.

Run it with the Python of an environment that has MXNet 1.9.1, from the repository's root:

    PYTHON-WITH-MXNET bench/peers/mxnet_symbols.py [folder]

Planner comparisons and the tests of ``weftplan.models`` read the files (gzipped if large, default folder
``bench/data/symbols``). Zoo networks come from MXNet's own model zoo, with a SoftmaxOutput on top. The names of
their nodes do not depend on the graphs that the process has built before.
"""

import gzip
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
import mxnet as mx  # noqa: E402 - MXNet warns while it is imported

GZIP_FROM = 20_000


def mlp():
    """Return an MLP 784-128-64-10 with relu."""
    net = mx.sym.Variable("data")
    net = mx.sym.FullyConnected(net, num_hidden=128, name="fc1")
    net = mx.sym.Activation(net, act_type="relu", name="relu1")
    net = mx.sym.FullyConnected(net, num_hidden=64, name="fc2")
    net = mx.sym.Activation(net, act_type="relu", name="relu2")
    net = mx.sym.FullyConnected(net, num_hidden=10, name="fc3")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def lenet():
    """Return LeNet: two 5x5 convolutions with tanh and max pooling, two fully connected layers."""
    net = mx.sym.Variable("data")
    for i, filters in enumerate((20, 50), 1):
        net = mx.sym.Convolution(net, kernel=(5, 5), num_filter=filters, name=f"conv{i}")
        net = mx.sym.Activation(net, act_type="tanh", name=f"tanh{i}")
        net = mx.sym.Pooling(net, pool_type="max", kernel=(2, 2), stride=(2, 2), name=f"pool{i}")
    net = mx.sym.Flatten(net, name="flatten")
    net = mx.sym.FullyConnected(net, num_hidden=500, name="fc1")
    net = mx.sym.Activation(net, act_type="tanh", name="tanh3")
    net = mx.sym.FullyConnected(net, num_hidden=10, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def lstm(steps=35, layers=2, hidden=200, vocabulary=10_000):
    """Return an unrolled LSTM language model."""
    cells = mx.rnn.SequentialRNNCell()
    for i in range(layers):
        cells.add(mx.rnn.LSTMCell(hidden, prefix=f"lstm_l{i}_"))
    embedded = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=vocabulary, output_dim=hidden, name="embed")
    outputs, _ = cells.unroll(
        steps, inputs=embedded, merge_outputs=True, begin_state=cells.begin_state(func=mx.sym.Variable)
    )
    net = mx.sym.Reshape(outputs, shape=(-1, hidden))
    net = mx.sym.FullyConnected(net, num_hidden=vocabulary, name="pred")
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    return mx.sym.SoftmaxOutput(net, label, name="softmax")


def zoo(name):
    """Return a network of ``mxnet.gluon.model_zoo.vision``."""
    block = mx.gluon.model_zoo.vision.get_model(name, prefix=f"{name.replace('.', '_')}_")
    return mx.sym.SoftmaxOutput(block(mx.sym.Variable("data")), name="softmax")


NETWORKS = {
    "mlp": mlp,
    "lenet": lenet,
    "alexnet": lambda: zoo("alexnet"),
    "vgg16": lambda: zoo("vgg16"),
    "resnet18": lambda: zoo("resnet18_v1"),
    "resnet50": lambda: zoo("resnet50_v1"),
    "resnet152": lambda: zoo("resnet152_v1"),
    "inception_v3": lambda: zoo("inceptionv3"),
    "densenet121": lambda: zoo("densenet121"),
    "mobilenet": lambda: zoo("mobilenet1.0"),
    "lstm": lstm,
}


def main():
    """Write every network, and print its numbers of operator nodes, characters and stored bytes."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join("bench", "data", "symbols")
    os.makedirs(folder, exist_ok=True)
    total = 0
    for name, build in NETWORKS.items():
        with mx.name.NameManager():
            text = build().tojson()
        operators = sum(node["op"] != "null" for node in json.loads(text)["nodes"])
        path = os.path.join(folder, f"{name}.json")
        data = text.encode()
        if len(data) >= GZIP_FROM:
            path, data = path + ".gz", gzip.compress(data, 9, mtime=0)
        with open(path, "wb") as file:
            file.write(data)
        total += len(data)
        print(f"{name:14} {operators:5} operators {len(text):8} characters {len(data):7} bytes stored")
    print(f"{total} bytes")


if __name__ == "__main__":
    main()
