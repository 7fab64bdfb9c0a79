"""Least CPU seconds of convolutions in PyTorch on one thread: ``torch_convolutions.py LAYERS REPETITIONS``.

LAYERS is a JSON list of convolutions, the tuples of bench_kernels.py. Prints a list of {"forward": seconds, "data": …,
"weight": …}.
"""

import json
import sys
import time

import torch

torch.set_num_threads(1)


def least(call, repetitions):
    """Return the least CPU seconds of ``repetitions`` calls."""
    best = float("inf")
    for _ in range(repetitions):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


def measure(layer, repetitions):
    """Return {pass: least CPU seconds} of one convolution, without ``data`` if its data has no gradient."""
    _, batch, channels, extent, filters, kernel, stride, pad, groups, has_data = layer
    x = torch.randn(batch, channels, extent, extent)
    w = torch.randn(filters, channels // groups, kernel, kernel)
    with torch.no_grad():
        y = torch.nn.functional.conv2d(x, w, None, stride, pad, 1, groups)
    dy = torch.randn_like(y)
    settings = (None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups)

    def backward(*mask):
        return torch.ops.aten.convolution_backward(dy, x, w, *settings, [*mask, False])

    with torch.no_grad():
        seconds = {
            "forward": least(lambda: torch.nn.functional.conv2d(x, w, None, stride, pad, 1, groups), repetitions),
            "weight": least(lambda: backward(False, True), repetitions),
        }
        if has_data:
            seconds["data"] = least(lambda: backward(True, False), repetitions)
    return seconds


print(json.dumps([measure(layer, int(sys.argv[2])) for layer in json.loads(sys.argv[1])]))
