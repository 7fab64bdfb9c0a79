"""Question: did a change of the operators change a kernel's bits? Prints digests of kernels that work elementwise.

    python bench/kernel_digests.py > before.txt
    python bench/kernel_digests.py > after.txt && diff before.txt after.txt
    python bench/kernel_digests.py --only sigmoid sgd_update

Every operator that accepts inputs of one shape (or, for binary operators, broadcast shapes) is called with special and
random values in each dtype: bound, replayed and by its bare form, in place for each in-place pair, and with each subset
of outputs unwanted. Each line has the call, the declared bytes of scratch, and a digest of all outputs and states. A
call that an operator refuses has no line. Random operators draw from a fixed key.
"""

import argparse
import hashlib
import itertools
import warnings

import numpy as np

import weftplan.ops  # noqa: F401  (registers the operators)
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.floats import dtype_of
from weftplan.ops.core.node_call import NodeCall, bare_call
from weftplan.ops.core.schema import TensorSpec

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int8", "uint8", "int64", "bool")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -7.0, np.inf, -np.inf, np.nan, 1e-40, 6.0e4, -1e30)
GRAIN = tiling.Grain(block=4500, tile_bytes=2 << 20)
"""Sizes of blocks, so that the greatest array has two."""
SHAPES = ((), (0, 3), (19,), (71, 73))
BROADCAST = (((3, 1, 5), (4, 1)), ((71, 73), (73,)), ((1,), (6, 7)), ((90, 2, 40), (1, 2, 40)), ((2, 3, 5000), (3, 1)))
STEP = {"lr": 0.1, "wd": 0.01, "eta": 0.3, "t": 3, "lrs": (0.1,), "wds": (0.01,), "momentum": 0.9}
VARIANTS = [
    {},
    {"scalar": 2.0}, {"scalar": -1.5}, {"scalar": 0.0}, {"scalar": 3.0},
    *({"act_type": kind} for kind in ("relu", "sigmoid", "softrelu", "softsign", "tanh")),
    *({"act_type": kind} for kind in ("leaky", "elu", "selu", "gelu", "rrelu", "prelu")),
    *({"act_type": kind, "slope": -0.5} for kind in ("leaky", "elu")),
    {"a_min": -0.75, "a_max": 1.5}, {"a": 1.5, "b": -2.0, "c": 0.25}, {"alpha": 0.3, "beta": 0.4},
    {"grad_scale": 0.5}, {"is_log": True},
    {"wd": 0.0}, {"clip_gradient": 0.5, "rescale_grad": 0.25}, {"clip_gradient": 0.5}, {"clip_weights": 0.8},
    {"clip_grad": 0.5},
    {"bias_correction": False}, {"lower_bound": 0.5, "upper_bound": 2.0}, {"num_weights": 2, "lrs": (0.1, 0.3),
    "wds": (0.0, 0.01)}, {"num_args": 3},
]  # fmt: skip


def values(shape, dtype, seed):
    """Return an array with special values first, then random ones; states of optimizers are seeds from 2 on."""
    rng = np.random.default_rng(seed)
    array = rng.standard_normal(int(np.prod(shape))) * (1.5 if dtype.kind in "fV" else 20)
    array[: len(SPECIAL)] = np.roll(SPECIAL, 3 * seed)[: array.size]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dtype.kind not in "fV":
            array = np.nan_to_num(np.clip(array, -100, 100))
            return array.astype(np.int64).astype(dtype).reshape(shape)
        return array.astype(dtype).reshape(shape)


def outcome(op, params, specs, outs, form, alias=None, wanted=None):
    """Return the digest of the outputs and states of one call."""
    ignored, states = set(op.ignored(params)), op.mutated(params)
    inputs = [None if k in ignored else values(s.shape, s.dtype, k) for k, s in enumerate(specs)]
    outputs = [
        np.full(s.nbytes, 0x5A, np.uint8).view(s.dtype).reshape(s.shape) if wanted is None or wanted[k] else None
        for k, s in enumerate(outs)
    ]
    if alias is not None:
        source = inputs[alias[0]]
        outputs[alias[1]] = source if source is not None else outputs[alias[1]]
    size = op.workspace_bytes(params, specs, outs)
    workspace = np.full(size, 0xFF, np.uint8) if size else None
    node = NodeCall(
        op, op.forward, params, np, inputs, outputs, workspace=workspace, output_shapes=[s.shape for s in outs]
    )
    if form == "bare":
        if any(array is None for array in (*inputs, *outputs)):
            return ""
        bare_call(op.forward, params, specs, outs, size)(
            *inputs, *outputs, *(() if workspace is None else (workspace,))
        )
    else:
        run = node.prepared() if form == "replayed" else node.bound(is_train=True, random_key=(7, 11))
        if run is None:
            return ""
        run()
    state = hashlib.sha256()
    for array in (*outputs, *(inputs[k] for k in states)):
        state.update(b"none" if array is None else array.tobytes())
    return state.hexdigest()[:16]


def calls(op, params, dtype):
    """Yield (label, input specs, output specs) of the calls of an operator."""
    names = op.input_names(params)
    count = op.num_outputs(params)
    wide = np.dtype(np.float32)
    for shape in SHAPES:
        yield str(shape), [TensorSpec(shape, dtype)] * len(names), [TensorSpec(shape, dtype)] * count
    norms = [TensorSpec((1,), dtype if name in ("r1", "r2") and "mp_" not in op.name else wide)
             if name in ("r1", "r2", "rescale_grad") else None for name in names]  # fmt: skip
    if any(norms) or "mp_" in op.name or "preloaded" in op.name:
        for shape in SHAPES[1:]:
            low = [name.startswith(("weight", "grad")) and not name.startswith("weight32") for name in names]
            specs = [
                norm or TensorSpec(shape, dtype if one or "mp_" not in op.name else wide)
                for norm, one in zip(norms, low, strict=True)
            ]
            if "preloaded" in op.name:
                specs[-2:] = [TensorSpec((count,), wide)] * 2
            yield f"mixed {shape}", specs, [TensorSpec(shape, dtype)] * count
            if "phase1" in op.name:
                yield f"mixed, wide {shape}", specs, [TensorSpec(shape, wide)] * count
    if len(names) == 2 or (op.backward_of and "broadcast" in op.name and len(names) == 3):
        for pair in BROADCAST:
            ins = [TensorSpec(shape, dtype) for shape in pair]
            full = TensorSpec(np.broadcast_shapes(*pair), dtype)
            if op.backward_of and count == 2:
                yield str(pair), [full, *ins][: len(names)], ins
            elif not op.backward_of:
                yield str(pair), ins, [full]
                yield f"samples {pair}", [full, TensorSpec(full.shape[:1], dtype)], [full]
    if "random_pdf" in op.name:
        for shape, head in (((3, 2, 1500), (3,)), ((3, 2, 1500), (3, 2)), ((2, 9001), (2,)), ((1, 9001), (1,))):
            data, own = TensorSpec(shape, dtype), TensorSpec(head, dtype)
            back = op.backward_of is not None
            ins = [data] * (1 + back) + [own] * (len(names) - 1 - back)
            yield f"samples {head}" if shape[0] == 3 else f"samples {shape}", ins, ins[1:] if back else [data]
    if params.get("act_type") == "prelu":
        for gamma in ((5,), (1,), (1, 5, 1), (8, 1, 300), (8, 5, 1)):
            data, own = TensorSpec((8, 5, 300), dtype), TensorSpec(gamma, dtype)
            back = op.backward_of is not None
            yield f"gamma {gamma}", [*[data] * back, data, own], [data, own] if back else [data]
    if op.backward_of in ("broadcast_add", "broadcast_sub"):
        for pair in BROADCAST:
            full = TensorSpec(np.broadcast_shapes(*pair), dtype)
            yield f"sums {pair}", [full], [TensorSpec(shape, dtype) for shape in pair]


def accepts(op, params, specs, outs):
    """Raise unless inference gives exactly these specs; backward operators have no inference."""
    if op.backward_of is None:
        shapes = op.infer_shape(params, [s.shape for s in specs], [None] * len(outs))
        dtypes = op.infer_dtype(params, [s.dtype for s in specs], [None] * len(outs))
        if [list(map(tuple, shapes[1])), list(dtypes[1])] != [[s.shape for s in outs], [s.dtype for s in outs]]:
            raise ValueError("inference")
        if [list(map(tuple, shapes[0])), list(dtypes[0])] != [[s.shape for s in specs], [s.dtype for s in specs]]:
            raise ValueError("inference")


def digest(op, params, specs, outs):
    """Return one digest of all forms, in-place pairs and subsets of outputs of a call."""
    accepts(op, params, specs, outs)
    cases = [(form, None, None) for form in ("bound", "replayed", "bare")]
    pairs = [(p.input, p.output) for p in op.inplace_pairs(params) if specs[p.input] == outs[p.output]]
    cases += [(form, pair, None) for pair in pairs for form in ("bound", "replayed", "bare")]
    if 1 < len(outs) <= 3 or op.aux:
        wishes = list(itertools.product((False, True), repeat=len(outs)))[:-1]
        cases += [(form, None, wanted) for wanted in wishes for form in ("bound", "replayed")]
        cases += [("bound", pair, w) for pair in pairs for w in wishes if w[pair[1]]]
    parts = [outcome(op, params, specs, outs, *case) for case in cases]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def main(names):
    """Print a line for each call of each operator."""
    np.seterr(all="ignore")
    warnings.simplefilter("ignore")
    for name in names or sorted(registry.names(aliases=False)):
        op = registry.get(name)
        known = {param.name for param in op.params}
        for variant in VARIANTS:
            if not set(variant) <= known or (not variant and "act_type" in known):
                continue
            attrs = {**{k: v for k, v in STEP.items() if k in known}, **variant}
            if op.variadic and op.variadic not in attrs:
                continue
            try:
                params = registry.parse_params(op, attrs)
                op.input_names(params)
            except Exception:
                continue
            for text in DTYPES:
                dtype = dtype_of(text)
                for label, specs, outs in calls(op, params, dtype):
                    try:
                        scratch, bits = op.workspace_bytes(params, specs, outs), digest(op, params, specs, outs)
                    except Exception:
                        continue
                    print(f"{name}; {variant or ''}; {text}; {label}; {scratch}; {bits}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of operators")
    with tiling.using(GRAIN):
        main(parser.parse_args().only)
