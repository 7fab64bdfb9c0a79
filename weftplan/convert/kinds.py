"""Kinds of activations, poolings and recurrent cells in weftplan and in ONNX: their names, and the order of gates.

Both directions of conversion rely on it; it holds constants only.
"""

from __future__ import annotations

ACTIVATIONS = {"softrelu": "Softplus"}
"""Kind of weftplan's operator Activation -> operator of ONNX, for kinds that are no operators of weftplan."""
LEAKY_RELU = {"leaky": "LeakyRelu", "elu": "Elu", "selu": "Selu", "prelu": "PRelu"}
"""Kind of weftplan's operator LeakyReLU -> operator of ONNX."""
POOLS = {"max": "MaxPool", "avg": "AveragePool", "lp": "LpPool"}
"""Kind of weftplan's operator Pooling -> operator of ONNX, which is preceded by Global for a global pooling."""
OPERATORS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
"""Mode of weftplan's operator RNN -> operator of ONNX."""
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
TO_ONNX = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn_tanh": (0,), "rnn_relu": (0,)}
"""For each ONNX gate (i, o, f, g; z, r, n), the index of weftplan's gate (i, f, g, o; r, z, n)."""
FROM_ONNX = {mode: tuple(order.index(k) for k in range(len(order))) for mode, order in TO_ONNX.items()}
