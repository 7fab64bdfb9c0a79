"""The networks that ``bench_gpu.py`` trains: bound, filled with reproducible numbers, and evaluated by torch, too."""

import numpy as np

import weftplan as mx
from weftplan import models
from weftplan.symbol.node import topological_order


def deep_mlp():
    """Return an MLP of twelve layers whose activations need more memory than its weights if the batch is large."""
    x = mx.sym.Variable("data")
    for _ in range(12):
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=64), act_type="tanh")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def bound(name, batch, ctx, **how):
    """Return (executor, names of its data inputs) of a network bound for training; ``how`` goes to ``simple_bind``."""
    if name == "chain":
        network, shapes = deep_mlp(), {"data": (batch, 64), "softmax_label": (batch,)}
    else:
        network, shapes = models.get(name), models.input_shapes(name, batch=batch)
    requests = {n: "null" if n in shapes else "write" for n in network.list_arguments()}
    return network.simple_bind(ctx, grad_req=requests, **how, **shapes), set(shapes)


def fill(executor, inputs, classes, words):
    """Fill the arguments and auxiliary states of an executor with the same random numbers on every call.

    Labels are whole numbers below ``classes``; if ``words`` is true, the input ``data`` is, too.
    """
    rng = np.random.default_rng(7)
    for name, array in executor.arg_dict.items():
        if "label" in name or (words and name == "data"):
            values = rng.integers(0, classes, array.shape)
        elif name in inputs:
            values = rng.standard_normal(array.shape)
        elif name.endswith("gamma"):
            values = np.ones(array.shape)
        else:
            values = rng.standard_normal(array.shape) * (2.0 / max(1, array[0:1].size)) ** 0.5
        array[:] = mx.nd.array(np.asarray(values, np.float32), ctx=array.context)
    for name, array in executor.aux_dict.items():
        array[:] = 1.0 if name.endswith("var") else 0.0


def step_of(executor, inputs, rate=1e-4):
    """Return a function that makes one training step: forward, backward, and SGD on every weight."""
    pairs = [(w, executor.grad_dict[n]) for n, w in executor.arg_dict.items() if n not in inputs]
    weights = [array for pair in pairs for array in pair]
    settings = {"num_weights": len(pairs), "lrs": (rate,) * len(pairs), "wds": (0.0,) * len(pairs)}

    def step():
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.multi_sgd_update(*weights, out=[w for w, _ in pairs], **settings)

    return step


class Twin:
    """An eager torch model that walks the graph of an executor, on copies of its arrays."""

    def __init__(self, torch, network, executor, inputs, args):
        self.torch, self.f = torch, torch.nn.functional
        place = "cpu" if args.standin else "cuda"
        self.nodes = topological_order(network.entries)
        self.arrays = {}
        arrays = {**executor.arg_dict, **executor.aux_dict}
        for name, array in arrays.items():
            tensor = torch.tensor(array.asnumpy(), device=place)
            self.arrays[name] = tensor.requires_grad_(name in executor.arg_dict and name not in inputs)
        self.weights = [t for t in self.arrays.values() if t.requires_grad]
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-4)
        self.head = network.entries[0].node

    def run(self):
        """Return (logits, labels), the inputs of the loss, which is the last node."""
        values = {}
        for node in self.nodes:
            if node.op is None:
                values[node] = (self.arrays[node.name],)
                continue
            inputs = [values[entry.node][entry.index] for entry in node.inputs]
            if node is self.head:
                return inputs[0], inputs[1].reshape(-1).long()
            actual = getattr(self, f"_{node.op.name.lower()}")(node.params, *inputs)
            values[node] = actual if isinstance(actual, tuple) else (actual,)
        raise AssertionError("the network ends in no SoftmaxOutput")

    def outputs(self):
        """Return the softmax of the logits as a NumPy array."""
        with self.torch.no_grad():
            return self.torch.softmax(self.run()[0], 1).cpu().numpy()

    def step(self):
        """Run one training step: forward, backward, SGD."""
        self.optimizer.zero_grad(set_to_none=True)
        logits, labels = self.run()
        self.f.cross_entropy(logits, labels, reduction="sum").backward()
        self.optimizer.step()

    def _fullyconnected(self, p, x, w, b=None):
        return self.f.linear(x.flatten(1) if p["flatten"] else x, w, b)

    def _convolution(self, p, x, w, b=None):
        return self.f.conv2d(x, w, b, p["stride"] or 1, p["pad"] or 0, p["dilate"] or 1, p["num_group"])

    def _activation(self, p, x):
        return getattr(self.torch, p["act_type"])(x)

    def _pooling(self, p, x):
        if p["global_pool"]:
            return x.mean((2, 3), keepdim=True) if p["pool_type"] == "avg" else x.amax((2, 3), keepdim=True)
        how = {"stride": p["stride"] or 1, "padding": p["pad"] or 0, "ceil_mode": p["pooling_convention"] == "full"}
        return (self.f.max_pool2d if p["pool_type"] == "max" else self.f.avg_pool2d)(x, p["kernel"], **how)

    def _batchnorm(self, p, x, gamma, beta, mean, var):
        gamma = None if p["fix_gamma"] else gamma
        return self.f.batch_norm(x, mean, var, gamma, beta, True, 1 - p["momentum"], p["eps"])

    def _flatten(self, p, x):
        return x.flatten(1)

    def _embedding(self, p, x, w):
        return self.f.embedding(x.long(), w)

    def _slicechannel(self, p, x):
        parts = x.chunk(p["num_outputs"], p["axis"])
        return tuple(part.squeeze(p["axis"]) for part in parts) if p["squeeze_axis"] else tuple(parts)

    def _concat(self, p, *parts):
        return self.torch.cat(parts, p["dim"])

    def _reshape(self, p, x):
        return x.reshape(p["shape"])

    def _expand_dims(self, p, x):
        return x.unsqueeze(p["axis"])

    def _elemwise_add(self, p, a, b):
        return a + b

    _broadcast_add = _elemwise_add

    def _elemwise_mul(self, p, a, b):
        return a * b

    def _dropout(self, p, x):
        return self.f.dropout(x, p["p"])
