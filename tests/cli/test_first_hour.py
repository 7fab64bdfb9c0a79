"""Typical first commands, right and wrong, on a pseudo-terminal of 80 columns.

Each answer has the expected exit code and words, is no wider than the terminal, and has no traceback.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from tests.cli.test_widths import on_a_terminal

WIDTH = 80
CHILD = """
import json, os, sys
from weftplan.cli import main

os.chdir(sys.argv[1])
for arguments in json.loads(sys.argv[2]):
    print("@", flush=True)
    os.dup2(1, 2)
    try:
        main(arguments, prog_name="weftplan")
    except SystemExit as end:
        print("exit", end.code, flush=True)
"""
TYPED = {
    "plan": (2, "Missing argument 'MODEL'"),
    "plan --help": (0, "Built-in networks: mlp, lenet"),
    "plan resnet-50": (2, "did you mean 'resnet50'?"),
    "plan mlp --budget 2 GB": (2, "Write a number and its unit without a space, such as 2GB"),
    "plan mlp --budget 80 %": (2, "Write a number and its unit without a space, such as 80%"),
    "plan mlp --budget 2": (1, "A number without a unit is in bytes: did you mean 2GB?"),
    "plan mlp --gpu 0": (2, "No such option '--gpu'. Did you mean --device?"),
    "train --gpus 1": (2, "No such option '--gpus'. Did you mean --devices?"),
    "plan mlp --memory 2GB": (2, "Did you mean --budget?"),
    "plan mlp --optimiser adam": (2, "--optimizer"),
    "plan mlp --optimizer adm": (1, "did you mean 'adam'?"),
    "plan mlp --dtype fp16": (1, "did you mean 'float16'?"),
    "plan mlp --device cuda": (2, "such as gpu0,gpu1"),
    "plan mlp --shape 32,784": (2, "NAME=DIMS such as data=32,3,224,224"),
    "plan mlp --budget 1MB": (1, "or --budget 1MB --batch-max, which finds the largest batch"),
    "plan mlp": (0, "KiB in all"),
    "plan old": (1, "--shape data=N,C,H,W"),
    "plan old --shape data=8,1,8,8": (0, "KiB in all"),
    "plan old-0007.params": (1, "give the symbol file, old-symbol.json beside it"),
    "inspect old": (0, "parameters of old-0007.params, the only file"),
    "inspect old 7": (0, "14 matched, 0 missing"),
    "inspect old 0": (2, "beside old-symbol.json there are old-0007.params"),
    "inspect old-0007.params": (1, "give the symbol file, old-symbol.json beside it"),
    "run old 7": (2, "Missing option '--input'"),
    "run old 7 --input images.npy": (0, "softmax_output: float32 (3, 10)"),
    "run old 7 --input flat.npy": (1, "Error: old-symbol.json: operator Convolution (node 'conv1')"),
    "run old 7 --input nope.npy": (2, "there is no file 'nope.npy'"),
    "run old 7 --input dat=images.npy": (2, "the network has no input 'dat'; did you mean 'data'?"),
    "tarin": (2, "did you mean 'train'?"),
}


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """Return {typed line: (exit code, lines shown)}; one child process runs all lines."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    text = on_a_terminal(CHILD, folder, json.dumps([line.split() for line in TYPED]))
    screens = {}
    for typed, screen in zip(TYPED, text.split("@\n")[1:], strict=True):
        *lines, end = screen.rstrip().split("\n")
        screens[typed] = int(end.removeprefix("exit ")), [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    return screens


def write_checkpoint(folder: Path) -> None:
    """Write an MXNet checkpoint called ``old`` with epoch 7, and input arrays with a right and a wrong shape."""
    net = mx.models.digits("lenet")
    shapes, _, states = net.infer_shape(data=(1, 1, 8, 8))
    weights = {
        name: mx.nd.ones(shape)
        for name, shape in zip(net.list_arguments(), shapes, strict=True)
        if name not in ("data", "softmax_label")
    }
    aux = {name: mx.nd.ones(shape) for name, shape in zip(net.list_auxiliary_states(), states, strict=True)}
    mx.model.save_checkpoint(str(folder / "old"), 7, net, weights, aux)
    np.save(folder / "images.npy", np.zeros((3, 1, 8, 8), np.float32))
    np.save(folder / "flat.npy", np.zeros((3, 8, 8), np.float32))


@pytest.mark.parametrize("typed", TYPED)
def test_what_is_typed_in_the_first_hour(screens: dict[str, tuple[int, list[str]]], typed: str) -> None:
    """A command has the expected exit code and words, in lines that fit the terminal."""
    code, lines = screens[typed]
    expected, words = TYPED[typed]
    assert code == expected, "\n".join(lines)
    assert re.sub(r"\s+", " ", words) in re.sub(r"\s+", " ", " ".join(lines)), "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH, "\n".join(lines)
    assert not any("Traceback" in line for line in lines)
