"""Training that does not fit into memory: find the smallest budget, train within it, and get the same weights.

python examples/fit_a_budget.py
"""

import numpy as np

import weftplan as mx
from weftplan.errors import BudgetError

net = mx.sym.Variable("data")
for i in range(5):
    net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=64, name=f"fc{i}"), act_type="tanh")
net = mx.sym.SoftmaxOutput(net, name="softmax")

rng = np.random.default_rng(0)
images, labels = rng.random((512, 64), dtype=np.float32), rng.integers(0, 64, 512)


def train(budget=None):
    """Return (weights after two epochs, memory plan of the executor)."""
    mx.random.seed(1)
    batches = mx.io.NDArrayIter(images, labels, batch_size=256)
    module = mx.mod.Module(net)
    module.fit(batches, optimizer="adam", num_epoch=2, memory_budget=budget)
    return module.get_params()[0], module.group.executors[0].memory_plan


needed = net.plan(data=(256, 64), context=[mx.cpu()], optimizer="adam").total
print(f"training takes {needed:,} bytes with everything kept")
try:
    train(needed // 2)
except BudgetError as error:
    smallest = error.smallest
    print(f"half of that is too little; {smallest:,} bytes are enough")
weights, plan = train(smallest)
again, _ = train()
print(plan.notes[0])
assert all(np.array_equal(weights[name].asnumpy(), again[name].asnumpy()) for name in weights)
print("the weights are those of training without a budget, bit for bit")
