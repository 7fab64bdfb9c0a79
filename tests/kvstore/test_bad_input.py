"""The exact error messages of stores for invalid input; later pushes and pulls are not affected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, KVStoreError


def zeros(*shape: int, dtype: str = "float32") -> Any:
    """Return an array of zeros."""
    return mx.nd.zeros(shape, dtype=dtype)


KNOWN = (
    "local, local_update_cpu, local_allreduce_cpu, device, local_allreduce_device, nccl, dist_sync, dist, "
    "dist_device_sync, dist_sync_device, dist_device, dist_async"
)

CASES: list[tuple[Callable[[Any], object], str]] = [
    (lambda kv: mx.kv.create("divice"), f"unknown kvstore 'divice': did you mean 'device'? known: {KNOWN}"),
    (lambda kv: mx.kv.create(3), "the name of a kvstore must be a str, got int"),
    (lambda kv: kv.push("v", zeros(3)), "push: key 'v' doesn't exist. Did you init? Known keys: ['w']"),
    (lambda kv: kv.pull("v", zeros(3)), "pull: key 'v' doesn't exist. Did you init? Known keys: ['w']"),
    (lambda kv: kv.push(3, zeros(3)), "Mixed key types are not allowed: this store uses str keys, got 3"),
    (lambda kv: kv.init(["v", 3], [zeros(3)] * 2), "Mixed key types are not allowed: this store uses str keys, got 3"),
    (lambda kv: kv.push(1.5, zeros(3)), "a key must be an int or a str, got float: 1.5"),
    (lambda kv: kv.init("w", zeros(3)), "key 'w' is initialised already; push a value to replace it"),
    (lambda kv: kv.init("v", [zeros(3)] * 2), "key 'v': init takes one value per key, got 2"),
    (lambda kv: kv.push("w", zeros(4)), "push: key 'w' holds (3,) float32, got (4,) float32 on cpu(0)"),
    (
        lambda kv: kv.push("w", [zeros(3), zeros(3, 1)]),
        "push: key 'w' holds (3,) float32, got (3, 1) float32 on cpu(0)",
    ),
    (
        lambda kv: kv.push("w", zeros(3, dtype="float64")),
        "push: key 'w' holds (3,) float32, got (3,) float64 on cpu(0)",
    ),
    (lambda kv: kv.pull("w", zeros(2)), "pull: key 'w' holds (3,) float32, got (2,) float32 on cpu(0)"),
    (lambda kv: kv.push("w", []), "key 'w': value is an empty list, expected at least one NDArray"),
    (lambda kv: kv.push("w", np.zeros(3)), "key 'w': value must be an NDArray or a list of them, got ndarray"),
    (lambda kv: kv.pull(["w"], [zeros(3)] * 2), "1 keys need a list of 1 items as out, got 2"),
    (lambda kv: kv.pull(["w"], zeros(3)), "1 keys need a list of 1 items as out, got NDArray"),
    (lambda kv: kv.pull("w"), "pull needs out=: the array or arrays to fill"),
    (
        lambda kv: kv.set_gradient_compression({"type": "3bit"}),
        "compression_params must have the type '2bit' or '1bit', such as {'type': '2bit', 'threshold': 0.5}; "
        "got {'type': '3bit'}",
    ),
    (
        lambda kv: kv.set_gradient_compression({"type": "2bit", "threshold": 0}),
        "the threshold of a compression must be a finite number above 0, got 0",
    ),
    (lambda kv: kv.set_updater(3), "an updater must be callable (key, merged, stored), got int"),
    (
        lambda kv: kv.set_optimizer("sgd"),
        "set_optimizer needs an optimizer such as mx.optimizer.create('sgd', learning_rate=0.1), got 'sgd'",
    ),
    (
        lambda kv: kv.set_optimizer(mx.optimizer.SGD),
        "set_optimizer needs an optimizer such as mx.optimizer.create('sgd', learning_rate=0.1), "
        "got <class 'weftplan.training.optimizers.sgd_adam.SGD'>",
    ),
    (lambda kv: kv.save_optimizer_states("nowhere"), "this store has no optimizer: call set_optimizer first"),
    (
        lambda kv: kv.row_sparse_pull("w", zeros(3), row_ids=zeros(1)),
        "row_sparse_pull: key 'w': out must be row_sparse, got 'default'; use pull",
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_the_message_and_a_store_that_goes_on(call: Callable[[Any], object], message: str) -> None:
    """An invalid call raises its exact message and adds no key; the next pull returns the sum of the next push."""
    kv = mx.kv.create("device")
    kv.init("w", zeros(3))
    with pytest.raises(KVStoreError) as error:
        call(kv)
    assert str(error.value).startswith(message) if message.endswith("dist_async") else str(error.value) == message
    out = zeros(3)
    kv.push("w", [mx.nd.ones((3,)), mx.nd.ones((3,))])
    kv.pull("w", out)
    assert out.tolist() == [2, 2, 2]
    assert kv.statistics()["keys"] == 1


def test_compression_of_another_dtype() -> None:
    """A store with compression refuses a float16 gradient and names its key and dtype; a float32 key is accepted."""
    kv = mx.kv.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init(["h", "w"], [zeros(3, dtype="float16"), zeros(3)])
    with pytest.raises(KVStoreError) as error:
        kv.push("h", zeros(3, dtype="float16"))
    assert str(error.value) == "push: key 'h' holds float16; a store with gradient compression takes float32 only"
    kv.push("w", mx.nd.ones((3,)))
    assert kv._stored["w"].tolist() == [0.5] * 3


def test_compression_on_a_store_that_has_none() -> None:
    """A store ``local`` refuses gradient compression, as in MXNet."""
    with pytest.raises(KVStoreError) as error:
        mx.kv.create("local").set_gradient_compression({"type": "2bit"})
    assert str(error.value) == "gradient compression is not for a store 'local': use mx.kv.create('device')"


@pytest.mark.parametrize("late", [False, True])
def test_an_updater_that_raises(late: bool) -> None:
    """An exchange raises the error of its updater, or of an operation that the updater pushed.

    Without the updater, the next exchange stores the pushed value.
    """
    kv = mx.kv.create("device")
    kv.init("w", zeros(3))

    def fail() -> None:
        raise ValueError("no data left")

    def updater(key: Any, merged: Any, stored: Any) -> None:
        if late:
            mx.engine.get().push(fail, (merged.var,), (stored.var,))
        else:
            fail()

    kv.set_updater(updater)

    def exchange() -> None:
        out = zeros(3)
        kv.push("w", mx.nd.ones((3,)))
        kv.pull("w", out)
        out.wait_to_read()

    with pytest.raises(ValueError, match="no data left"):
        exchange()
    kv.set_updater(None)
    exchange()
    assert kv._stored["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_truncated_file_of_states(tmp_path: Path, part: float) -> None:
    """Loading a truncated or foreign file of optimizer states raises an error and changes no state."""
    kv, file = mx.kv.create("device"), tmp_path / "states"
    kv.init("w", zeros(3))
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
    kv.push("w", mx.nd.ones((3,)))
    kv.save_optimizer_states(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(part * len(whole))])
    refused = f"{re.escape(str(file))}: optimizer states are truncated or not a states file"
    with pytest.raises(FormatError, match=refused):
        kv.load_optimizer_states(file)
    file.write_bytes(b"\x93NUMPY, or a text")
    with pytest.raises(FormatError, match=rf"{refused}, it begins b'\\x93NUMPY, '"):
        kv.load_optimizer_states(file)
    kv.save_optimizer_states(file)
    assert file.read_bytes() == whole
