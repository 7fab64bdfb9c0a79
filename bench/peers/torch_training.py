"""Median seconds of one PyTorch training step (SGD with momentum): ``torch_training.py NETWORK STEPS THREADS``."""

import json
import statistics
import sys
import time

import torch
import training_networks
from torch import nn


def mlp():
    """Return an MLP 784-512-512-10."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def lenet():
    """Return the PyTorch model of training_networks.lenet."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


class Block(nn.Module):
    """A residual block: two convolutions and a shortcut."""

    def __init__(self, before, filters, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, filters, 3, stride, 1, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, 1, 1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.same = nn.Identity()
        if before != filters:
            self.same = nn.Sequential(nn.Conv2d(before, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x):
        """Return relu(body + shortcut)."""
        return torch.relu(self.body(x) + self.same(x))


def conv(before, filters, stride, kernel, groups=1):
    """Return the layers of a convolution with batch norm and relu, as a list."""
    one = nn.Conv2d(before, filters, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [one, nn.BatchNorm2d(filters), nn.ReLU()]


def mobilenet():
    """Return the PyTorch model of training_networks.mobilenet."""
    layers, before = conv(3, 32, 2, 3), 32
    steps = [(1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512), *[(1, 512)] * 5, (2, 1024), (1, 1024)]
    for stride, filters in steps:
        layers += conv(before, before, stride, 3, before) + conv(before, filters, 1, 1)
        before = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10))


def resnet18_224():
    """Return the PyTorch model of training_networks.resnet18_224."""
    return resnet18(large=True)


def resnet18(large=False):
    """Return the PyTorch model of training_networks.resnet18; with ``large``, of resnet18_224."""
    layers, before = conv(3, 64, 2 if large else 1, 7 if large else 3), 64
    if large:
        layers.append(nn.MaxPool2d(3, 2, 1))
    for filters in (64, 128, 256, 512):
        for block in (0, 1):
            layers.append(Block(before, filters, 2 if block == 0 and filters != 64 else 1))
            before = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Lstm(nn.Module):
    """The PyTorch model of training_networks.lstm."""

    def __init__(self, words, hidden=200):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.last = nn.Linear(hidden, words)

    def forward(self, x):
        """Return the scores of all words, one row for each word of each sample."""
        return self.last(self.lstm(self.embedding(x))[0].flatten(0, 1))


def lstm():
    """Return the PyTorch model of training_networks.lstm."""
    return Lstm(training_networks.WORDS)


def main(network, steps, threads):
    """Train on one random batch; print the median wall and CPU seconds of a step, and the last loss, as JSON."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = globals()[network]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data, labels = training_networks.batch(network)
    x, y = torch.from_numpy(data), torch.from_numpy(labels).long().flatten()
    if network == "lstm":
        x = x.long()

    def step():
        start, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start, time.process_time() - used, loss

    for _ in range(2):
        step()
    results = [step() for _ in range(steps)]
    wall, cpu, losses = zip(*results, strict=True)
    print(json.dumps({"step_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "loss": float(losses[-1])}))


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
