"""Samples a second of a loader: ``data_loading.py weftplan|torch DATASET BATCH WORKERS EPOCHS``; prints JSON.

The first epoch starts the workers and does not count. Every batch is looked at once.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from data_samples import DATASETS


def weftplan_epochs(source, batch, workers):
    """A function that reads one epoch."""
    import weftplan as mx

    it = mx.io.DatasetIter(source, batch, shuffle=True, num_workers=workers)

    def epoch():
        it.reset()
        return sum(one.data[0].shape[0] - one.pad for one in it)

    return epoch


def torch_epochs(source, batch, workers):
    """A function that reads one epoch."""
    from torch.utils.data import DataLoader

    loader = DataLoader(source, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: sum(len(data) for data, _ in loader)


def main():
    """Measure and print."""
    framework, name, batch, workers, epochs = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    source = DATASETS[name]()
    epoch = (weftplan_epochs if framework == "weftplan" else torch_epochs)(source, batch, workers)
    epoch()
    rates = []
    for _ in range(epochs):
        start = time.perf_counter()
        count = epoch()
        rates.append(count / (time.perf_counter() - start))
    print(json.dumps(sorted(rates)[len(rates) // 2]))


if __name__ == "__main__":
    main()
