"""ONNX import of LSTM, GRU and RNN; a GRU with its reset gate before the product is unrolled."""

from __future__ import annotations

import numpy as np

from weftplan import symbol as sym
from weftplan.convert.kinds import FROM_ONNX, GATES
from weftplan.convert.onnx_in.reading import OnnxCall, rule
from weftplan.support.array_types import RawArray
from weftplan.symbol import Symbol

_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}


def _mode(call: OnnxCall, directions: int) -> str:
    """Return weftplan's name of the cell; refuse activations that it cannot have."""
    activations = [str(name).lower() for name in call.get("activations") or []]
    if call.op == "RNN":
        activations = (
            activations[:directions] or ["tanh"] * directions
        )  # onnxruntime writes more activations than directions
        if activations in (["tanh"] * directions, ["relu"] * directions):
            return f"rnn_{activations[0]}"
    elif not activations or activations == _ACTIVATIONS[call.op] * directions:
        return str(call.op).lower()
    raise call.refuse(f"activations {activations} are not read")


def _refuse_unsupported(call: OnnxCall) -> None:
    if call.get("clip"):
        raise call.refuse("clip is not read")
    if call.get("input_forget", 0):
        raise call.refuse("input_forget is not read")
    if call.op == "LSTM" and call.has(7) and np.any(call.constant(7)):
        raise call.refuse("peepholes are not read")


@rule("LSTM", "GRU", "RNN")
def _recurrent(call: OnnxCall) -> list[Symbol]:
    direction = str(call.get("direction", "forward")).lower()
    directions = 2 if direction == "bidirectional" else 1
    mode = _mode(call, directions)
    _refuse_unsupported(call)
    weight, recurrent = call.constant(1), call.constant(2)
    size = int(call.get("hidden_size") or recurrent.shape[2])
    gates = GATES[mode]
    if weight.shape[:2] != (directions, gates * size) or recurrent.shape != (directions, gates * size, size):
        raise call.refuse(f"weights of shape {weight.shape} and {recurrent.shape} do not fit hidden_size {size}")
    bias = call.constant(3) if call.has(3) else np.zeros((directions, 2 * gates * size), np.float32)
    if bias.shape != (directions, 2 * gates * size):
        raise call.refuse(f"a bias of shape {bias.shape} does not fit hidden_size {size}")
    batch_first = bool(call.get("layout", 0))
    shape = call.shape()
    steps, batch = (shape[1], shape[0]) if batch_first else shape[:2]
    data = call.make("SwapAxis", call.symbol(), dim1=0, dim2=1) if batch_first else call.symbol()
    if direction == "reverse":
        data = call.make("reverse", data, axis=(0,))
    states = [_state(call, k, (directions, batch, size), batch_first) for k in ((5, 6) if mode == "lstm" else (5,))]
    if mode == "gru" and not call.get("linear_before_reset", 0):
        if directions == 2 or _lengths(call, steps):
            raise call.refuse("linear_before_reset=0 is read in one direction and without sequence lengths alone")
        results = _unrolled_gru(call, data, weight[0], recurrent[0], bias[0], states[0], steps, size)
    else:
        packed = _packed(mode, size, weight, recurrent, bias)
        lengths = _lengths(call, steps)
        if lengths and direction == "reverse":
            raise call.refuse("sequence lengths are not read with direction reverse")
        node = call.make(
            "RNN", data, call.model.parameter(f"{call.name}_parameters", packed), *states, *lengths, mode=mode,
            state_size=size, num_layers=1, bidirectional=directions == 2, state_outputs=True,
            use_sequence_length=bool(lengths),
        )  # fmt: skip
        results = [node[k] for k in range(1 + len(states))]
    stacked = call.make("reshape", results[0], shape=(0, 0, directions, size))
    if direction == "reverse":
        stacked = call.make("reverse", stacked, axis=(0,))
    stacked = call.make("transpose", stacked, axes=(1, 0, 2, 3) if batch_first else (0, 2, 1, 3))
    ends = [call.make("SwapAxis", end, dim1=0, dim2=1) if batch_first else end for end in results[1:]]
    return [stacked, *ends]


def _state(call: OnnxCall, k: int, shape: tuple[int, int, int], batch_first: bool) -> Symbol:
    """Return the initial state: an input, or zeros."""
    if not call.has(k):
        zeros: Symbol = sym.zeros(shape=shape)
        return zeros
    return call.make("SwapAxis", call.symbol(k), dim1=0, dim2=1) if batch_first else call.symbol(k)


def _lengths(call: OnnxCall, steps: int) -> list[Symbol]:
    """Return the lengths of the samples, unless all have the full length."""
    if not call.has(4) or (not isinstance(call.inputs[4], Symbol) and np.all(call.inputs[4] == steps)):
        return []
    return [call.symbol(4)]


def _ordered(rows: RawArray, mode: str, size: int) -> RawArray:
    """Return ``rows``, whose gates are in ONNX's order, flattened with the gates in weftplan's order."""
    gates = rows.reshape(GATES[mode], size, *rows.shape[1:])
    return gates[list(FROM_ONNX[mode])].reshape(-1)


def _packed(mode: str, size: int, weight: RawArray, recurrent: RawArray, bias: RawArray) -> RawArray:
    """Return the vector of all parameters: weights of each direction, then biases."""
    parts = [_ordered(rows, mode, size) for pair in zip(weight, recurrent, strict=True) for rows in pair]
    parts += [_ordered(half, mode, size) for vector in bias for half in np.split(vector, 2)]
    return np.concatenate(parts).astype(np.float32)


def _unrolled_gru(
    call: OnnxCall,
    data: Symbol,
    weight: RawArray,
    recurrent: RawArray,
    bias: RawArray,
    state: Symbol,
    steps: int,
    size: int,
) -> list[Symbol]:
    """Return [(steps, batch, size), (1, batch, size)], unrolled, with the reset gate before the state's product."""
    of_input, of_state = np.split(bias, 2)
    parameter = call.model.parameter
    inputs = call.make(
        "FullyConnected", data, parameter(f"{call.name}_weight", weight),
        parameter(f"{call.name}_bias", of_input + of_state), num_hidden=3 * size, flatten=False,
    )  # fmt: skip
    gate_weight = parameter(f"{call.name}_gates", recurrent[: 2 * size])
    new_weight = parameter(f"{call.name}_new", recurrent[2 * size :])
    h = call.make("reshape", state, shape=(-3, 0))
    outputs = []
    for t in range(steps):
        step = call.make("reshape", call.make("slice_axis", inputs, axis=0, begin=t, end=t + 1), shape=(-3, 0))
        gates = call.make("slice_axis", step, axis=1, begin=0, end=2 * size) + call.make(
            "FullyConnected", h, gate_weight, num_hidden=2 * size, no_bias=True
        )
        update, reset = call.make("SliceChannel", call.make("sigmoid", gates), num_outputs=2, axis=1)
        new = call.make("slice_axis", step, axis=1, begin=2 * size, end=3 * size) + call.make(
            "FullyConnected", reset * h, new_weight, num_hidden=size, no_bias=True
        )
        new = call.make("tanh", new)
        h = new + update * (h - new)
        outputs.append(h)
    return [call.make("stack", *outputs, axis=0), call.make("expand_dims", h, axis=0)]
