"""``mx.kv.create``: stores by name, plug-in stores, and the placement of merge buffers."""

import pytest

import weftplan as mx
from weftplan.errors import KVStoreError
from weftplan.kvstore import factory


@pytest.mark.parametrize("name", ["locl", "divice", ""])
def test_unknown_name(name):
    """An unknown name raises a KVStoreError."""
    with pytest.raises(KVStoreError, match="unknown kvstore"):
        mx.kv.create(name)


def test_an_unknown_name_lists_the_known_ones():
    """The error for an unknown name lists the known names and suggests the nearest."""
    with pytest.raises(KVStoreError) as error:
        mx.kv.create("divice")
    for name in ("local", "device", "nccl", "dist_sync", "dist_device_sync", "dist_async", "did you mean 'device'"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("Local", "KVStoreLocal"),
        ("local_update_cpu", "KVStoreLocal"),
        ("local_allreduce_cpu", "KVStoreLocal"),
        ("local_allreduce_device", "on_device.KVStoreDevice"),
        ("dist", "distributed.sync.KVStoreDistSync"),
        ("dist_sync", "distributed.sync.KVStoreDistSync"),
        ("dist_device", "distributed.sync.KVStoreDistDeviceSync"),
        ("dist_sync_device", "distributed.sync.KVStoreDistDeviceSync"),
        ("dist_async", "distributed.asynchronous.KVStoreDistAsync"),
        ("NCCL", "nccl.KVStoreNccl"),
    ],
)
def test_spellings_of_mxnet(name, made, monkeypatch):
    """Each of MXNet's names of stores creates the matching class, in any case and with its words in another order."""
    monkeypatch.setattr(factory, "_import_store", lambda module, kind, name: f"{module}.{kind}")
    actual = mx.kv.create(name)
    assert (actual if isinstance(actual, str) else type(actual).__name__) == made


def test_missing_store_of_mxnet():
    """Creating ``p3``, a store of MXNet that weftplan lacks, raises an error with "not available in this version"."""
    with pytest.raises(KVStoreError, match="not available in this version"):
        mx.kv.create("p3")


@pytest.mark.skipif(mx.num_gpus() > 0, reason="there is a GPU")
def test_nccl_without_a_gpu():
    """Without a GPU, creating ``nccl`` raises an error that names the package to install."""
    with pytest.raises(KVStoreError, match=r"'nccl' sums on NVIDIA GPUs: gpu\(0\).*pip install '?weftplan\[cuda12\]"):
        mx.kv.create("nccl")


def test_plugin_store():
    """A registered class is created by its name in lower case; registering it again warns."""

    class MyOwnStore(mx.kv.KVStoreBase):
        """A plug-in store without methods."""

    mx.kv.register(MyOwnStore)
    assert isinstance(mx.kv.create("myownstore"), MyOwnStore)
    with pytest.warns(UserWarning, match="registered again"):
        mx.kv.register(MyOwnStore)


def test_plugin_store_registered_as_in_mxnet():
    """``KVStoreBase.register`` also registers a class, as in MXNet."""

    @mx.kv.KVStoreBase.register
    class AnotherStore(mx.kv.KVStoreBase):
        """A plug-in store without methods."""

    assert isinstance(mx.kv.create("AnotherStore"), AnotherStore)


def test_device_store_balances_merge_buffers():
    """With an updater, each key gets its merge buffer on the device with the fewest bytes of merge buffers so far."""
    kv = mx.kv.create("device")
    kv.set_updater(lambda key, merged, stored: None)  # without one no merge buffer is needed
    for key in range(4):
        kv.init(key, mx.nd.zeros((100,)))
        kv.push(key, [mx.nd.ones((100,), ctx=mx.cpu(i)) for i in range(2)])
    assert [str(kv._merged[key].context) for key in range(4)] == ["cpu(0)", "cpu(1)", "cpu(0)", "cpu(1)"]
    assert repr(kv) == "<KVStoreDevice 'device': 4 keys, its own updater>"
    assert kv.statistics() == {"keys": 4, "stored_bytes": 1600, "merged_bytes": 1600, "staging_bytes": 0}


def test_commands_to_servers():
    """A command to servers returns None and does nothing in a store of one process, as in MXNet."""
    for name in ("local", "device"):
        assert mx.kv.create(name)._send_command_to_servers(0, "anything") is None
