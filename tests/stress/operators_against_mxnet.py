"""Random operator calls in this package and in MXNet 1.9.1: outputs, gradients and auxiliary states must agree.

    python tests/stress/operators_against_mxnet.py --mxnet-python /path/to/bin/python --seeds 0 1000

MXNET_PYTHON is an alternative to the option. Each seed is one call (see tests/golden/random_cases.py); the two packages
run in separate processes. Calls that MXNet refuses are counted and not compared. Differences are listed, and the exit
status is then 1.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "golden"), str(TESTS / "ops")]
TOLERANCE = {"float64": 1e-6, "float32": 2e-4, "float16": 2e-2}


def mxnet_results(case, inputs, generate, mx):
    """Return {key: array} of one case in MXNet: outputs, gradients (also of integers) and auxiliary states."""
    arrays = inputs.case_inputs(case)
    variables = [mx.sym.Variable(f"in{k}") for k in range(len(arrays))]
    named = dict(zip(case["names"], variables)) if "names" in case else {}  # noqa: B905
    positional = [] if named else variables
    symbol = generate.operator_of(mx, case["op"])(*positional, **named, **case["params"], name="op")
    auxiliary = symbol.list_auxiliary_states()
    held = {f"in{k}": mx.nd.array(x, dtype=x.dtype) for k, x in enumerate(arrays)}
    arguments = {key: value for key, value in held.items() if key not in auxiliary}
    wanted = case.get("grad", True)
    requests = {key: "write" if wanted is True or (wanted and int(key[2:]) in wanted) else "null" for key in arguments}
    gradients = {key: mx.nd.full(value.shape, 77, dtype=value.dtype) for key, value in arguments.items()}
    executor = symbol.bind(
        mx.cpu(), arguments, args_grad=gradients, grad_req=requests, aux_states={key: held[key] for key in auxiliary}
    )
    outputs = executor.forward(is_train=case["is_train"])
    result = {f"out{k}": y.asnumpy() for k, y in enumerate(outputs)}
    if wanted and case["is_train"]:
        heads = [inputs.case_ograd(case, k, y.shape, y.dtype) for k, y in enumerate(outputs)]
        executor.backward([mx.nd.array(g, dtype=g.dtype) for g in heads])
        result.update({"grad" + key[2:]: gradients[key].asnumpy() for key in arguments if requests[key] == "write"})
    result.update({"aux" + key[2:]: executor.aux_dict[key].asnumpy() for key in auxiliary})
    return result


def compute(first, last, room):
    """Run the case of each seed in MXNet's Python; write results to ``SEED.npz`` and refusals to ``SEED.txt``."""
    import generate
    import inputs
    import mxnet as mx
    from random_cases import random_case

    for seed in range(first, last):
        refusal = room / f"{seed}.txt"
        refusal.write_text("its process died")  # overwritten unless the process dies
        try:
            result = mxnet_results(random_case(seed), inputs, generate, mx)
        except Exception as error:
            refusal.write_text(str(error).strip().splitlines()[-1][:200])
            continue
        np.savez(room / f"{seed}.npz", **result)
        refusal.unlink()


def their_results(python, first, last):
    """Return MXNet's results {seed: {key: array}} and its refusals {seed: reason}.

    If MXNet's process dies, a new one continues with the next seed.
    """
    with tempfile.TemporaryDirectory() as folder:
        room = pathlib.Path(folder)
        following = first
        while following < last:
            command = [python, __file__, "--compute", folder, "--seeds", str(following), str(last)]
            ended = subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode
            if not ended:
                break
            done = [int(path.stem) for path in room.iterdir()]
            if ended > 0 or not done or max(done) < following:
                sys.exit(f"MXNet's process ended with status {ended}: {' '.join(command)}")
            following = max(done) + 1
        results = {int(path.stem): dict(np.load(path)) for path in room.glob("*.npz")}
        return dict(sorted(results.items())), {int(path.stem): path.read_text() for path in sorted(room.glob("*.txt"))}


def our_results(case, inputs, harness):
    """Return {key: array} of one case in this package, with the keys of :func:`mxnet_results`."""
    call = harness.prepare(case["op"], inputs.case_inputs(case), case["params"], is_train=case["is_train"])
    outputs = call()
    visible = call.op.num_visible_outputs(call.params)
    result = {f"out{k}": outputs[k] for k in range(visible)}
    wanted = case.get("grad", True)
    if wanted and case["is_train"] and call.op.gradient is not None:
        heads = [inputs.case_ograd(case, k, s.shape, s.dtype) for k, s in enumerate(call.out_specs[:visible])]
        heads += [np.zeros(s.shape, s.dtype) for s in call.out_specs[visible:]]
        with np.errstate(all="ignore"):
            gradient = harness.differentiate(call, heads)[0]
        result |= {f"grad{k}": g for k, g in enumerate(gradient) if wanted is True or k in wanted}
    result |= {f"aux{k}": call.inputs[k] for k in call.op.aux}
    return result


def difference(case, ours, theirs):
    """Return the first difference between the results of a case as text, or None."""
    for key, want in theirs.items():
        if key not in ours:
            if key.startswith("grad") and not want.any():
                continue
            return f"{key} is missing"
        got = ours[key]
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{key} is {got.shape} {got.dtype}, MXNet's {want.shape} {want.dtype}"
        kinds = [TOLERANCE.get(str(want.dtype), 0.0)]
        kinds += [TOLERANCE.get(spec["dtype"], 0.0) for spec in case["inputs"]]
        rtol = max(case.get("rtol", 0.0), *kinds)
        finite = np.abs(want[np.isfinite(want)].astype(float))
        atol = max(case.get("atol", 0.0), rtol) * max(1.0, float(finite.max(initial=0.0)))
        if not np.allclose(got.astype(float), want.astype(float), rtol=rtol, atol=atol, equal_nan=True):
            worst = np.nanmax(np.abs(got.astype(float) - want.astype(float)))
            return f"{key} differs by {worst:.3g}: {got.ravel()[:6]} against {want.ravel()[:6]}"
    return None


def main():
    """Compare the chosen seeds, print differences and refusals, and exit with status 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet-python", default=os.environ.get("MXNET_PYTHON"))
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 200), metavar=("FIRST", "LAST"))
    parser.add_argument("--compute", metavar="FOLDER", type=pathlib.Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    first, last = chosen.seeds
    if chosen.compute:
        compute(first, last, chosen.compute)
        return
    if not chosen.mxnet_python:
        parser.error("say where the Python of MXNet 1.9.1 is: --mxnet-python, or MXNET_PYTHON")
    import harness
    import inputs
    from random_cases import random_case

    results, refused = their_results(chosen.mxnet_python, first, last)
    wrong = 0
    for seed, theirs in results.items():
        case = random_case(seed)
        try:
            says = difference(case, our_results(case, inputs, harness), theirs)
        except Exception as error:
            says = f"{type(error).__name__}: {error}"
        if says:
            wrong += 1
            print(f"seed {seed}: {case['op']} {case['params']} {case['inputs']}\n    {says}")
    for seed, why in refused.items():
        case = random_case(seed)
        print(f"seed {seed}: MXNet refuses {case['op']} {case['params']}: {why}")
    print(f"{last - first} calls: {len(results) - wrong} agree, {wrong} differ, MXNet refuses {len(refused)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
