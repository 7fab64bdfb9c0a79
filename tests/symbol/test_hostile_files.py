"""Damaged and malicious files raise a clear error in little time and memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weftplan as mx
from tests.support.seeds import seed
from weftplan.errors import FormatError, MXNetError

ROOT = Path(__file__).parents[2]
HUGE = 2**31 - 1
KINDS = ["symbol", "params", "onnx", "safetensors", "recordio", "image"]
COUNTS = [
    ("add_n", {"num_args": HUGE}),
    ("Concat", {"num_args": HUGE}),
    ("stack", {"num_args": HUGE}),
    ("UpSampling", {"num_args": HUGE, "scale": 2, "sample_type": "nearest"}),
    ("Crop", {"num_args": HUGE}),
    ("SliceChannel", {"num_outputs": HUGE}),
    ("_split_v2", {"sections": HUGE, "indices": "(0,)"}),
    ("multi_sgd_update", {"num_weights": HUGE, "lrs": "(1,)", "wds": "(1,)"}),
    ("multi_all_finite", {"num_arrays": HUGE}),
    ("multi_sum_sq", {"num_arrays": HUGE}),
    ("_rnn_param_concat", {"num_args": HUGE}),
    ("_backward_Concat", {"num_args": HUGE}),
    ("_backward_SliceChannel", {"num_outputs": HUGE}),
    ("RNN", {"num_layers": HUGE, "state_size": 4, "mode": "lstm"}),
]


def file_of(op: str, attrs: dict[str, object], inputs: int = 1) -> str:
    """Return the JSON of a symbol with the operator ``op`` on ``inputs`` variables."""
    nodes = [{"op": "null", "name": f"x{k}", "inputs": []} for k in range(inputs)]
    texts = {key: str(value) for key, value in attrs.items()}
    nodes.append({"op": op, "name": "y", "attrs": texts, "inputs": [[k, 0, 0] for k in range(inputs)]})
    return json.dumps(
        {
            "nodes": nodes,
            "arg_nodes": list(range(inputs)),
            "heads": [[inputs, 0, 0]],
            "attrs": {"mxnet_version": ["int", 10901]},
        }
    )


def limited(*arguments: str, seconds: int, megabytes: int) -> str:
    """Run ``tests.stress.hostile`` with a limit of time and memory, and return its output.

    ``megabytes`` are allowed in addition to the memory of the imports. The test fails if the program does.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.hostile", str(megabytes), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_huge_counts_raise(tmp_path: Path) -> None:
    """A count of 2,147,483,647 inputs or outputs raises an error within the limits of time and memory."""
    for k, (op, attrs) in enumerate(COUNTS):
        (tmp_path / f"{k}.json").write_text(file_of(op, attrs, 3 if op == "RNN" else 1))
    out = limited("load", *(str(path) for path in sorted(tmp_path.glob("*.json"))), seconds=60, megabytes=300)
    assert out.count("refused") == len(COUNTS)


@pytest.mark.parametrize(
    ("op", "attrs"), [case for case in COUNTS if "num_args" in case[1] and case[0] != "_backward_Concat"]
)
def test_the_error_compares_the_count_with_the_inputs(op: str, attrs: dict[str, object]) -> None:
    """The error for a wrong count names the node, the parameter and its value."""
    text = file_of(op, {**attrs, "num_args": 5}, inputs=2)
    with pytest.raises(MXNetError, match=r"'y' \(.*\)|'y'.*") as caught:
        mx.sym.load_json(text)
    assert "num_args" in str(caught.value)
    assert "5" in str(caught.value)


def test_too_many_outputs_are_refused() -> None:
    """A file whose operators have five million outputs in total is refused."""
    nodes = [{"op": "null", "name": "x", "inputs": []}]
    nodes += [
        {"op": "SliceChannel", "name": f"s{k}", "attrs": {"num_outputs": "65536"}, "inputs": [[0, 0, 0]]}
        for k in range(80)
    ]
    text = json.dumps({"nodes": nodes, "heads": [[80, 0, 0]], "attrs": {"mxnet_version": ["int", 10901]}})
    with pytest.raises(FormatError, match="outputs"):
        mx.sym.load_json(text)


def test_mutations_of_files_are_refused_or_read() -> None:
    """150 mutations of each kind of file give a result or an MXNetError, in little time and memory."""
    needed = {"onnx": "onnx", "safetensors": "safetensors", "recordio": "PIL", "image": "PIL"}
    kinds = [kind for kind in KINDS if kind not in needed or importlib.util.find_spec(needed[kind]) is not None]
    out = limited("fuzz", ",".join(kinds), str(seed()), "150", seconds=110, megabytes=600)
    for kind in kinds:
        assert f"150 mutations of kind {kind}" in out


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_mutations(kind: str) -> None:
    """10,000 mutations of each kind of file give a result or an MXNetError, in little time and memory."""
    out = limited("fuzz", kind, str(seed(fresh=True)), "10000", seconds=850, megabytes=600)
    assert "10000 mutations" in out
