"""Golden cases of recurrent layers (pure data).

On a CPU, MXNet cannot differentiate projections, and ignores sequence lengths.
"""

from itertools import product

CASES = []


def _rnn(mode, layers, both, states, *, dtype="float32", steps=4, batch=3, inputs=5, size=4, project=None, **more):
    gates = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}[mode]
    sides = 2 if both else 1
    units = project or size
    count = sum(gates * size * ((sides * units if k else inputs) + units + 2) for k in range(layers)) * sides
    count += layers * sides * (project or 0) * size
    shapes = [(steps, batch, inputs), (count,), (layers * sides, batch, units)]
    if mode == "lstm":
        shapes.append((layers * sides, batch, size))
    params = {"mode": mode, "num_layers": layers, "state_size": size, "bidirectional": both, "state_outputs": states}
    if project:
        params["projection_size"] = project
    case = {"op": "RNN", "params": params, "inputs": [{"shape": s, "dtype": dtype} for s in shapes]}
    # Steps are summed in another order than in MXNet.
    CASES.append({**case, "rtol": 1e-5 if dtype == "float64" else 5e-5, **more})
    CASES[-1]["params"] = {**params, **more.get("params", {})}


for _mode, _layers, _both in product(("rnn_relu", "rnn_tanh", "lstm", "gru"), (1, 2, 3), (False, True)):
    _rnn(_mode, _layers, _both, True)
    # MXNet's float64 code gives wrong gradients of deep plain cells: its own float32 code (oneDNN), compared above,
    # gives others for the same call.
    _wrong = _mode.startswith("rnn") and _layers + _both > 2
    _rnn(_mode, _layers, _both, _layers == 2, dtype="float64", grad=not _wrong)
for _mode in ("rnn_relu", "rnn_tanh", "lstm", "gru"):
    _rnn(_mode, 2, False, False)
    _rnn(_mode, 1, True, True, steps=1)
    _rnn(_mode, 2, True, True, batch=1, inputs=1, size=1)
    _rnn(_mode, 2, True, True, is_train=False, grad=False, params={"p": 0.5})
for _layers, _both in product((1, 2), (False, True)):
    _rnn("lstm", _layers, _both, True, project=3, is_train=False, grad=False)
