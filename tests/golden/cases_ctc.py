"""Golden cases of CTCLoss (pure data). On a CPU, MXNet computes it only in float32."""

CASES = []


def _add(labels, steps, channels, *lengths, **params):
    for scale in (1.0, 10.0):
        data = {"shape": (steps, len(labels), channels), "low": -scale, "high": scale}
        inputs = [data, {"value": [[float(k) for k in row] for row in labels]}]
        inputs += [{"value": [float(k) for k in values]} for values in lengths]
        # Probabilities are summed in another order than in MXNet.
        name = f"CTCLoss {labels} {steps} {channels} {lengths} {params} {scale}"
        case = {"op": "CTCLoss", "inputs": inputs, "params": params, "grad": [0], "rtol": 1e-4, "atol": 2e-5}
        names = ["data", "label", *(key[4:] for key in params if key.startswith("use_"))]
        CASES.append({**case, "name": name, "names": names})


_add([[1, 2, 1], [2, 2, 0], [3, 0, 0], [1, 3, 2]], 8, 4)
_add([[1, 2, 0], [0, 0, -1], [2, -1, -1], [2, 1, 0]], 8, 4, blank_label="last")
_add([[1]], 1, 2)
_add([[1, 1], [2, 1]], 2, 3)  # two equal labels need three steps: no loss
_add([[0, 0], [2, 0]], 4, 3)  # no label at all
_add([[1, 2, 1], [2, 2, 2]], 6, 4, [3, 6], use_data_lengths=True)
_add([[1, 2, 1], [2, 1, 2]], 6, 4, [1, 3], use_label_lengths=True)
_add([[1, 2, 1], [2, 2, 2], [3, 1, 1]], 6, 4, [3, 6, 2], [2, 2, 3], use_data_lengths=True, use_label_lengths=True)
_add([[0, 2, 1], [2, 2, 2]], 6, 4, [3, 6], [2, 2], use_data_lengths=True, use_label_lengths=True, blank_label="last")
