"""The tests of training, with GPU or simulated devices in place of CPUs."""

import pytest

import weftplan as mx
from tests.training.test_module import (  # noqa: F401 - tests
    fit,
    test_allocated_equals_planned,
    test_checkpoint_round_trip,
    test_contexts_agree_on_moving_statistics_after_an_epoch,
    test_input_gradients_and_fixed_parameters,
    test_learns,
    test_other_batch_size_is_rebound,
    weights,
)
from tests.training.test_optimizers import test_shapes_of_outputs  # noqa: F401


@pytest.mark.parametrize(("kind", "workers"), [("ThreadedEngine", 4), ("ThreadedEnginePerDevice", 1)])
def test_same_bits_on_every_engine(there, kind, workers):
    """Training with dropout on two devices gives bitwise identical weights on every engine."""

    def train(kind, count):
        with mx.engine.using(mx.engine.create(kind, cpu_workers=count, gpu_workers=count)):
            return weights(fit([there(0), there(1)], epochs=1, dropout=0.3)[0])

    base, got = train("NaiveEngine", 1), train(kind, workers)
    assert {name: value.tobytes() for name, value in got.items()} == {n: v.tobytes() for n, v in base.items()}
