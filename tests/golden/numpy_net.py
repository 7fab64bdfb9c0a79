"""Generate the golden files of a Gluon network on MXNet's NumPy interface.

Run it with the Python of MXNet 1.9.1 (see README.md):

    python tests/golden/numpy_net.py

It exports the network as users do, and stores an input with MXNet's outputs.
"""

import pathlib

import mxnet as mx
import numpy as np
from mxnet import np as mnp
from mxnet import npx
from mxnet.gluon import HybridBlock, nn

DATA = pathlib.Path(__file__).resolve().parent / "data"


class Net(HybridBlock):
    """A network of layers, arithmetic, reductions and shape operators, mixed as in users' code."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.convolution = nn.Conv2D(4, 3, in_channels=3)
            self.norm = nn.BatchNorm(in_channels=4)
            self.layer_norm = nn.LayerNorm(in_channels=4)
            self.dropout = nn.Dropout(0.5)
            self.dense = nn.Dense(5, in_units=4)

    def hybrid_forward(self, F, x):
        """Return six outputs; the last has no dimensions."""
        y = F.npx.relu(self.norm(self.convolution(x)))
        z = F.np.mean(y, axis=(2, 3))
        z = self.layer_norm(z) * 2.0 + 1.0 - z / 3.0
        z = F.np.concatenate([z, F.np.exp(-z)], axis=1)
        z = F.npx.reshape(z, (-2, 2, -1))
        z = F.np.sum(F.np.transpose(z, (0, 2, 1)), axis=-1)
        z = F.np.where(z > 0, z, F.np.zeros_like(z))
        z = F.np.tanh(F.np.maximum(z, 0.1)) ** 2
        z = F.np.split(z, 2, axis=1)[0]
        z = F.np.stack([z, F.np.sqrt(F.np.abs(z) + 0.5)], axis=1)
        z = F.np.max(F.np.squeeze(F.np.expand_dims(z, 1), 1), axis=1)
        z = F.npx.leaky_relu(F.npx.softmax(F.np.clip(z, -1, 1)))
        z = z - F.np.mean(z, axis=-1, keepdims=True)
        z = F.np.concatenate([z, z], axis=-1)
        picked = F.npx.pick(z, F.np.zeros_like(F.np.sum(z, axis=1)))
        return (
            self.dense(self.dropout(z)), F.np.argmax(z, axis=1), picked, F.np.dot(z, F.np.transpose(z)),
            F.np.var(z, axis=1), F.np.std(z),
        )  # fmt: skip


def main():
    """Write the exported network (two files), and its input and outputs (one file)."""
    npx.set_np()
    mx.random.seed(3)
    net = Net()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    x = mnp.array(np.random.RandomState(1).uniform(size=(2, 3, 6, 6)), dtype="float32")
    net(x)
    net.export(str(DATA / "numpy_net"))
    outputs = net(x)
    stored = {f"out{k}": y.asnumpy() for k, y in enumerate(outputs)}
    np.savez_compressed(DATA / "numpy_net.npz", x=x.asnumpy(), **stored)


if __name__ == "__main__":
    main()
