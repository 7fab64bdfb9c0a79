"""An unrolled LSTM language model.

Every time step has its own nodes and shares the weights, so the gradient of a weight is a sum with one term per step.
The initial states of a batch are arguments of the network.
"""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.symbol import Symbol


class _Cell:
    """One LSTM layer: its shared weights, and its step."""

    def __init__(self, hidden: int, prefix: str) -> None:
        self.hidden = hidden
        self.prefix = prefix
        self.weights = {
            kind: (sym.Variable(f"{prefix}{kind}_weight"), sym.Variable(f"{prefix}{kind}_bias", init=init))
            for kind, init in (("i2h", '["lstmbias", {"forget_bias": 1.0}]'), ("h2h", None))
        }
        self.h, self.c = (
            sym.Variable(f"{prefix}begin_state_{i}", shape=(0, hidden), __layout__="NC") for i in range(2)
        )

    def _project(self, x: Symbol, kind: str, name: str) -> Symbol:
        weight, bias = self.weights[kind]
        result: Symbol = sym.FullyConnected(x, weight, bias, num_hidden=4 * self.hidden, name=f"{name}{kind}")
        return result

    def step(self, x: Symbol, t: int) -> Symbol:
        """Advance the state by input ``x`` at time ``t``; return the output."""
        name = f"{self.prefix}t{t}_"
        gates = self._project(x, "i2h", name) + self._project(self.h, "h2h", name)
        parts = sym.SliceChannel(gates, num_outputs=4, name=f"{name}slice")
        enter, forget, candidate, leave = (
            sym.Activation(part, act_type=kind, name=f"{name}{letter}")
            for part, kind, letter in zip(parts, ("sigmoid", "sigmoid", "tanh", "sigmoid"), "ifco", strict=True)
        )
        self.c = sym.elemwise_add(forget * self.c, enter * candidate, name=f"{name}state")
        self.h = sym.elemwise_mul(leave, sym.Activation(self.c, act_type="tanh"), name=f"{name}out")
        return self.h


def lstm(classes: int = 10_000, *, steps: int = 35, layers: int = 2, hidden: int = 200) -> Symbol:
    """Build an embedding, ``layers`` of LSTM unrolled over ``steps``, and a softmax over the vocabulary at every step.

    Inputs: ``data`` and ``softmax_label`` of (batch, steps), and two initial states per layer.
    """
    x = sym.Embedding(sym.Variable("data"), input_dim=classes, output_dim=hidden, name="embed")
    sequence = list(sym.split(x, axis=1, num_outputs=steps, squeeze_axis=1))
    for layer in range(layers):
        cell = _Cell(hidden, f"lstm_l{layer}_")
        sequence = [cell.step(item, t) for t, item in enumerate(sequence)]
    x = sym.Concat(*(sym.expand_dims(item, axis=1) for item in sequence), dim=1)
    x = sym.FullyConnected(sym.Reshape(x, shape=(-1, hidden)), num_hidden=classes, name="pred")
    label = sym.Reshape(sym.Variable("softmax_label"), shape=(-1,))
    result: Symbol = sym.SoftmaxOutput(x, label, name="softmax")
    return result


def begin_states(batch: int, *, layers: int = 2, hidden: int = 200) -> dict[str, tuple[int, int]]:
    """Return the shapes of the initial states.

    >>> begin_states(32, layers=1)
    {'lstm_l0_begin_state_0': (32, 200), 'lstm_l0_begin_state_1': (32, 200)}
    """
    return {f"lstm_l{layer}_begin_state_{i}": (batch, hidden) for layer in range(layers) for i in range(2)}
