"""Speed of a data loader: ``data_loading.py weftplan|torch DATASET BATCH WORKERS EPOCHS``.

Prints a JSON list: samples per second (median over the epochs), and microseconds of processor time per sample of this
process and its workers together. The first epoch starts the workers and does not count.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from data_samples import DATASETS


def weftplan_epochs(source, batch, workers):
    """Return (function that reads one epoch and counts its samples, function that returns the workers' process ids)."""
    import weftplan as mx

    it = mx.io.DatasetIter(source, batch, shuffle=True, num_workers=workers)

    def epoch():
        it.reset()
        return sum(one.data[0].shape[0] - one.pad for one in it)

    return epoch, lambda: it.worker_pids


def torch_epochs(source, batch, workers):
    """Return the two functions of :func:`weftplan_epochs` for PyTorch's loader."""
    from torch.utils.data import DataLoader

    loader = DataLoader(source, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: sum(len(data) for data, _ in loader), lambda: [w.pid for w in loader._iterator._workers]


def processor_s(pids):
    """Return the CPU seconds so far of this process and of the processes ``pids``."""
    total = time.process_time()
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main():
    """Measure the named loader; print its samples per second and its processor time per sample."""
    framework, name, batch, workers, epochs = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    source = DATASETS[name]()
    epoch, pids = (weftplan_epochs if framework == "weftplan" else torch_epochs)(source, batch, workers)
    epoch()
    rates, read, before = [], 0, processor_s(pids())
    for _ in range(epochs):
        start = time.perf_counter()
        count = epoch()
        rates.append(count / (time.perf_counter() - start))
        read += count
    print(json.dumps([sorted(rates)[len(rates) // 2], (processor_s(pids()) - before) / read * 1e6]))


if __name__ == "__main__":
    main()
