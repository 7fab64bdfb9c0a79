"""Generate the golden files: run every case of ``cases_*.py`` in MXNet 1.9.1 and store the results.

Run it with the Python of an environment that has MXNet 1.9.1 (see README.md). weftplan is neither needed nor imported:

    python tests/golden/generate.py [cases_tensor cases_nn ...]
"""

import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def operator_of(mx, name):
    """Return the symbol function of a public or internal operator."""
    places = [(mx.sym, ""), (mx.symbol._internal, "")]
    places += [(getattr(mx.sym, short), f"_{short}_") for short in ("linalg", "contrib", "image")]
    for module, prefix in places:
        function = getattr(module, name[len(prefix) :], None) if name.startswith(prefix) else None
        if function is not None:
            return function
    raise SystemExit(f"MXNet has no operator {name}")


def loaded_symbol(mx, case, count):
    """Return the case's operator on ``count`` variables, loaded from the JSON of a symbol file."""
    variables = [{"op": "null", "name": f"in{k}", "inputs": []} for k in range(count)]
    node = {
        "op": case["op"],
        "name": "op",
        "attrs": {key: str(value) for key, value in case.get("params", {}).items()},
        "inputs": [[k, 0, 0] for k in range(count)],
    }
    heads = [[count, k, 0] for k in range(3 if case.get("params", {}).get("output_mean_var") else 1)]
    graph = {"nodes": [*variables, node], "arg_nodes": list(range(count)), "heads": heads}
    return mx.sym.load_json(json.dumps(graph))


def run_case(mx, case, inputs):
    """Return the results of a case as {key: array}.

    Keys are out<k>, grad<k> (by input), and aux<k> (by auxiliary state, after the run).
    """
    arrays = inputs.case_inputs(case)
    if case.get("imperative"):
        return run_imperative(mx, case, arrays)
    variables = [mx.sym.Variable(f"in{k}") for k in range(len(arrays))]
    named = dict(zip(case["names"], variables)) if "names" in case else {}  # noqa: B905
    provided = [] if named else variables
    if case["op"].startswith("_np") or case["op"] == "BatchNorm_v1":  # no functions for ordinary symbols, or for states
        symbol = loaded_symbol(mx, case, len(arrays))
    else:
        symbol = operator_of(mx, case["op"])(*provided, **named, **case.get("params", {}), name="op")
    auxiliary = symbol.list_auxiliary_states()
    named = {f"in{k}": mx.nd.array(x, dtype=x.dtype) for k, x in enumerate(arrays)}
    arguments = {key: value for key, value in named.items() if key not in auxiliary}
    wanted = case.get("grad", True)
    requests = {key: "write" if wanted is True or (wanted and int(key[2:]) in wanted) else "null" for key in arguments}
    if not arguments:
        requests = "null"
    gradients = {key: mx.nd.full(value.shape, 77, dtype=value.dtype) for key, value in arguments.items()}
    executor = symbol.bind(
        mx.cpu(), arguments, args_grad=gradients, grad_req=requests, aux_states={key: named[key] for key in auxiliary}
    )
    is_train = case.get("is_train", True)
    outputs = executor.forward(is_train=is_train)
    result = {f"out{k}": y.asnumpy() for k, y in enumerate(outputs)}
    if wanted and arguments:
        executor.backward(
            [mx.nd.array(inputs.case_ograd(case, k, y.shape, y.dtype), dtype=y.dtype) for k, y in enumerate(outputs)],
            is_train=is_train,
        )
        for key in arguments:
            if requests[key] == "write" and arguments[key].dtype in (np.float32, np.float64, np.float16):
                result[f"grad{key[2:]}"] = gradients[key].asnumpy()
    for key in auxiliary:
        result[f"aux{key[2:]}"] = executor.aux_dict[key].asnumpy()
    return result


def run_imperative(mx, case, arrays):
    """Return {key: array} of an operator that only NDArrays have, such as an optimizer step.

    Keys are out<k>, and aux<k> for inputs that the operator changed.
    """
    inputs = [mx.nd.array(x, dtype=x.dtype) for x in arrays]
    params = dict(case.get("params", {}))
    if "out" in case:  # MXNet cannot infer some outputs: they have the shapes of these inputs
        params["out"] = [mx.nd.zeros(inputs[k].shape, dtype=inputs[k].dtype) for k in case["out"]]
    place = mx.nd if hasattr(mx.nd, case["op"]) else mx.nd._internal
    outputs = getattr(place, case["op"])(*inputs, **params)
    result = {f"out{k}": y.asnumpy() for k, y in enumerate(outputs if isinstance(outputs, list) else [outputs])}
    for k, (before, after) in enumerate(zip(arrays, inputs)):  # noqa: B905  (MXNet's Python may be 3.8)
        if not np.array_equal(before, after.asnumpy()):
            result[f"aux{k}"] = after.asnumpy()
    return result


def signatures():
    """Return {operator name: [inputs, parameters]} of MXNet's classic operators, from its documentation."""
    from mxnet import operator

    by_name = {}
    for name in sorted(operator.get_all_registered_operators()):
        if name.startswith(("_np", "_contrib", "_sg", "_sample", "_sparse", "_backward", "_cv", "_multi")):
            continue
        arguments = operator.get_operator_arguments(name)
        inputs = [a for a, kind in zip(arguments.names, arguments.types) if "NDArray" in kind]  # noqa: B905
        by_name[name] = [inputs, [a for a in arguments.names if a not in inputs]]
    return by_name


def main(chosen):
    """Generate the files of the chosen case lists, or of all lists and the list of operators."""
    import inputs
    import mxnet as mx

    if mx.__version__ != "1.9.1":
        raise SystemExit(f"expected MXNet 1.9.1, this is {mx.__version__}")
    inputs.DATA.mkdir(exist_ok=True)
    if not chosen:
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in signatures().items()]
        (inputs.DATA / "operators.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for stem, cases in inputs.load_cases().items():
        if chosen and stem not in chosen:
            continue
        stored = {}
        for name, case in cases.items():
            try:
                result = run_case(mx, case, inputs)
            except Exception as error:
                raise SystemExit(f"{stem}: {name}: {error}") from error
            stored[f"{name}/case"] = np.array(inputs.case_text(case))
            stored.update({f"{name}/{key}": value for key, value in result.items()})
        path = inputs.DATA / f"{stem}.npz"
        np.savez_compressed(path, **stored)
        print(f"{path.name}: {len(cases)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
