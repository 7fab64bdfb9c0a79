"""ONNX export of RNN: one LSTM, GRU or RNN per layer, with its weights cut from the packed vector."""

from __future__ import annotations

import numpy as np

from weftplan.convert.kinds import GATES, OPERATORS, TO_ONNX
from weftplan.convert.onnx_out.writing import NodeWriter, rule


class _Vector:
    """Reader of the packed parameters, from the front."""

    def __init__(self, call: NodeWriter) -> None:
        self.call = call
        self.at = 0

    def cut(self, size: int) -> str:
        """Return the next ``size`` elements."""
        call, start = self.call, self.at
        self.at += size
        bounds = [call.constant([number], np.int64) for number in (start, self.at, 0)]
        return call.emit("Slice", [call.inputs[1], *bounds])


def _gates(call: NodeWriter, part: str, gate_order: list[int]) -> str:
    """Return the gates of one direction in ONNX's order: (1, gates · size, …)."""
    mode, size = call.params["mode"], call.params["state_size"]
    order = TO_ONNX[mode]
    gates = call.emit("Reshape", [part, call.constant([len(order), size, *gate_order], np.int64)])
    if len(order) > 1:
        gates = call.emit("Gather", [gates, call.constant(order, np.int64)], axis=0)
    return call.emit("Reshape", [gates, call.constant([1, len(order) * size, *gate_order], np.int64)])


def _joined(call: NodeWriter, parts: list[str], axis: int = 0) -> str:
    return parts[0] if len(parts) == 1 else call.emit("Concat", parts, axis=axis)


@rule("RNN")
def _rnn(call: NodeWriter) -> None:
    p = call.params
    mode, size, layers = p["mode"], p["state_size"], p["num_layers"]
    if p["projection_size"] is not None:
        raise call.refuse("projection_size has no counterpart")
    directions, rows = (2 if p["bidirectional"] else 1), GATES[mode] * size
    steps, batch, width = call.shape()
    vector = _Vector(call)
    weights: list[tuple[list[str], list[str]]] = []
    for layer in range(layers):
        inputs = width if layer == 0 else directions * size
        pairs = [
            (_gates(call, vector.cut(rows * inputs), [inputs]), _gates(call, vector.cut(rows * size), [size]))
            for _ in range(directions)
        ]
        weights.append(([firsts for firsts, _ in pairs], [second for _, second in pairs]))
    biases = [
        [_joined(call, [_gates(call, vector.cut(rows), []) for _ in range(2)], axis=1) for _ in range(directions)]
        for _ in range(layers)
    ]
    states = call.inputs[2 : 4 if mode == "lstm" else 3]
    lengths = call.emit("Cast", [call.inputs[-1]], to=6) if p["use_sequence_length"] else ""
    facts = {"hidden_size": size, "direction": "bidirectional" if directions == 2 else "forward"}
    if mode == "gru":
        facts["linear_before_reset"] = 1
    elif mode == "rnn_relu":
        facts["activations"] = ["Relu"] * directions
    data, ends = call.inputs[0], [[] for _ in states]  # type: ignore[var-annotated]
    for layer in range(layers):
        indices = [call.constant([number], np.int64) for number in (layer * directions, (layer + 1) * directions, 0)]
        begin = [call.emit("Slice", [state, *indices]) for state in states]
        names = [call.fresh() for _ in range(1 + len(states))]
        of_input, of_state = weights[layer]
        call.emit(
            OPERATORS[mode],
            [data, _joined(call, of_input), _joined(call, of_state), _joined(call, biases[layer]), lengths, *begin],
            names,
            **facts,
        )
        turned = call.emit("Transpose", [names[0]], perm=[0, 2, 1, 3])
        final = call.outputs[0] if layer == layers - 1 else None
        data = call.emit("Reshape", [turned, call.constant([steps, batch, directions * size], np.int64)], final)
        for name, end in zip(names[1:], ends, strict=True):
            end.append(name)
    if p["state_outputs"]:
        for output, end in zip(call.outputs[1:], ends, strict=False):
            call.emit("Concat", end, output, axis=0)


@rule("_rnn_param_concat")
def _param_concat(call: NodeWriter) -> None:
    call.end("Concat", call.inputs, axis=call.params["dim"])


@rule("_zeros", "_ones", "_full")
def _filled(call: NodeWriter) -> None:
    assert call.node.op is not None
    value = {"_zeros": 0, "_ones": 1}.get(call.node.op.name, call.params.get("value"))
    kind = np.dtype(call.params["dtype"] or np.float32)
    call.end("Identity", [call.constant(np.full(call.out_shape(), value, kind))])
