"""Cases of unrolled cells, and of the order of samples in iterators over files, as plain code over both packages' API.

``unrolls(mx)`` and ``file_orders(mx)`` get either package and return ``{key: array}``, stored in ``data/training.npz``.
"""

import os
import tempfile
import zlib

import numpy as np


def _cells(mx):
    """Return cells of every class by name; Zoneout and Dropout draw nothing outside training."""
    rnn = mx.rnn

    def stack(*cells):
        both = rnn.SequentialRNNCell()
        for cell in cells:
            both.add(cell)
        return both

    def pair(k):
        return rnn.BidirectionalCell(rnn.LSTMCell(3, f"l{k}_"), rnn.GRUCell(3, f"r{k}_"), output_prefix=f"b{k}_")

    cells = {
        "rnn": rnn.RNNCell(3, activation="relu"),
        "lstm": rnn.LSTMCell(3, forget_bias=2.0),
        "gru": rnn.GRUCell(3),
        "pair": pair(0),
        "stack": stack(rnn.LSTMCell(3, "first_"), pair(1), rnn.DropoutCell(0.4), rnn.RNNCell(3, prefix="last_")),
        "residual": rnn.ResidualCell(rnn.GRUCell(4, "residual_")),
        "residual pair": rnn.ResidualCell(rnn.BidirectionalCell(rnn.GRUCell(2, "rl_"), rnn.RNNCell(2, prefix="rr_"))),
        "zoneout": rnn.ZoneoutCell(rnn.LSTMCell(3, "zoneout_"), 0.3, 0.2),
    }
    for mode in ("rnn_relu", "rnn_tanh", "lstm", "gru"):
        for both in (False, True):
            fused = rnn.FusedRNNCell(3, 2, mode, both, dropout=0.3 * both, prefix=f"{mode}{both}_")
            cells[f"{mode} {both}"], cells[f"{mode} {both} unfused"] = fused, fused.unfuse()
    return cells


def unrolls(mx):
    """Return the outputs, the last states, and the gradient of the input, of each cell unrolled over three steps.

    Layouts, merged and separate inputs and outputs alternate. Parameters are drawn from their names.
    """
    result = {}
    for number, (name, cell) in enumerate(_cells(mx).items()):
        layout, merged = ("NTC", "TNC")[number % 2], number % 3 != 1
        inputs = mx.sym.var("data") if number % 4 < 2 else [mx.sym.var(f"t{k}") for k in range(3)]
        outputs, states = cell.unroll(3, inputs, layout=layout, merge_outputs=merged)
        heads = [*([outputs] if merged else outputs), *_flat(states)]
        net = mx.sym.Group([mx.sym.BlockGrad(head) if k >= len(heads) - len(_flat(states)) else head * (k + 1)
                            for k, head in enumerate(heads)])  # fmt: skip
        shapes = {"data": (2, 3, 4) if layout == "NTC" else (3, 2, 4)}
        if isinstance(inputs, list):
            shapes = {f"t{k}": (2, 4) for k in range(3)}
        names = net.list_arguments()
        known = dict(zip(names, net.infer_shape(**shapes)[0]))  # noqa: B905 - MXNet's Python may be 3.8
        values = {key: mx.nd.array(_drawn(key, shape)) for key, shape in known.items()}
        gradients = {key: mx.nd.zeros(known[key]) for key in shapes}
        executor = net.bind(mx.cpu(), values, gradients, {key: "write" if key in shapes else "null" for key in names})
        for k, out in enumerate(executor.forward(is_train=False)):
            result[f"{name} {k}"] = out.asnumpy()
        if "Dropout" not in net.tojson() and '"p": "0.3"' not in net.tojson():
            out = executor.forward(is_train=True)
            executor.backward([mx.nd.ones(one.shape) for one in out])
            result |= {f"{name} d {key}": value.asnumpy() for key, value in gradients.items()}
    return result


def _flat(states):
    """Return the symbols of nested lists of states."""
    return [states] if not isinstance(states, (list, tuple)) else [one for state in states for one in _flat(state)]


def _drawn(name, shape):
    """Return an array from the seed of its name; it is the same for both packages."""
    return np.random.RandomState(zlib.crc32(name.encode()) % 2**31).uniform(-0.6, 0.6, shape).astype(np.float32)


def file_orders(mx):
    """Return data, labels and padding of iterators over files, of resized and of prefetching iterators, two epochs.

    Samples that are padding are left out.
    """
    rows = np.arange(14, dtype=np.float32).reshape(7, 2)
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: os.path.join(folder, name) for name in ("data.csv", "label.csv", "data.libsvm", "label.libsvm")}
        np.savetxt(paths["data.csv"], rows, fmt="%g", delimiter=",")
        np.savetxt(paths["label.csv"], rows[:, :1] * 10, delimiter=",")
        sparse = "".join(f"{k} {k % 3}:{k + 1}.5 {k % 3 + 1}:{k + 2}\n" for k in range(7))
        for name in ("data.libsvm", "label.libsvm"):
            with open(paths[name], "w") as file:
                file.write(sparse)

        def arrays(size=3, last="pad"):
            return mx.io.NDArrayIter({"b": rows, "a": rows + 50}, {"y": rows[:, 0]}, size, last_batch_handle=last)

        csv = {"data_csv": paths["data.csv"], "data_shape": (2,), "batch_size": 3}
        makers = {
            "csv": lambda: mx.io.CSVIter(label_csv=paths["label.csv"], **csv),
            "csv without labels": lambda: mx.io.CSVIter(**csv),
            "csv whole batches": lambda: mx.io.CSVIter(round_batch=False, **csv),
            "csv of one value": lambda: mx.io.CSVIter(
                data_csv=paths["data.csv"], data_shape=(2, 1), batch_size=2, dtype="int32"
            ),
            "libsvm": lambda: mx.io.LibSVMIter(data_libsvm=paths["data.libsvm"], data_shape=(5,), batch_size=3),
            "libsvm with labels": lambda: mx.io.LibSVMIter(
                data_libsvm=paths["data.libsvm"], data_shape=(5,), batch_size=2,
                label_libsvm=paths["label.libsvm"], label_shape=(4,),
            ),
            "shorter": lambda: mx.io.ResizeIter(arrays(), 2),
            "shorter, going on": lambda: mx.io.ResizeIter(arrays(), 2, reset_internal=False),
            "longer": lambda: mx.io.ResizeIter(arrays(last="discard"), 5),
            "prefetched": lambda: mx.io.PrefetchingIter(arrays()),
            "prefetched pair": lambda: mx.io.PrefetchingIter(
                [arrays(), arrays()], [{"a": "a1", "b": "b1"}, {"a": "a2", "b": "b2"}],
                [{"y": "y1"}, {"y": "y2"}],
            ),
        }  # fmt: skip
        for name, make in makers.items():
            iterator, rows_of = make(), []
            for epoch in range(2):
                for batch in iterator:
                    label = batch.label or []
                    kept = batch.data[0].shape[0] - (batch.pad or 0)  # MXNet's padding may be any memory
                    dense = [array.asnumpy()[:kept].ravel() for array in (*batch.data, *label)]
                    rows_of.append(np.concatenate([[epoch, batch.pad or 0], *dense]))
                iterator.reset()
            result[name] = np.concatenate(rows_of)
            names = [one[0] for one in (*iterator.provide_data, *iterator.provide_label)]
            result[f"{name} names"] = np.array([zlib.crc32(one.encode()) % 4096 for one in names])
            del iterator
    return result
