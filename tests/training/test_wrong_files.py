"""Files and parameters of the wrong kind: each error names the actual kind and the remedy."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weftplan as mx
from weftplan import models
from weftplan.errors import BindError, FormatError, MXNetError, ParameterError, ShapeError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def saved_prefix(tmp_path: Path) -> Path:
    """Save a network for epochs 3 and 7, and another model with a similar prefix; return the prefix."""
    network = models.get("mlp")
    actual, _, _ = network.infer_shape(**models.input_shapes("mlp", 1))
    shapes = dict(zip(network.list_arguments(), actual, strict=True))
    args = {name: mx.nd.ones(shape) for name, shape in shapes.items() if name not in models.input_shapes("mlp", 1)}
    for epoch in (3, 7):
        mx.model.save_checkpoint(tmp_path / "net", epoch, network, args, {})
    mx.model.save_checkpoint(tmp_path / "net-large", 5, None, args, {})  # another model
    return tmp_path / "net"


def test_a_wrong_epoch_says_which_there_are(saved_prefix: Path) -> None:
    """A missing epoch raises; the error lists this model's files only. A wrong prefix has its own error."""
    with pytest.raises(FileNotFoundError, match=r"there are net-0003\.params, net-0007\.params") as error:
        mx.model.load_checkpoint(saved_prefix, 5)
    assert "large" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no parameters with this prefix"):
        mx.model.load_params(saved_prefix.parent / "other", 0)
    with pytest.raises(FileNotFoundError, match=r"beside it there are \['net-symbol\.json'\]"):
        mx.model.load_checkpoint(saved_prefix.parent / "other", 0)
    for name in ("net-symbol.json", "net-0003.params"):
        with pytest.raises(
            FileNotFoundError, match=rf"{name} is a file, and a prefix is what its name begins with: net"
        ):
            mx.model.load_checkpoint(saved_prefix.parent / name, 3)
    (saved_prefix.parent / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no other -symbol\.json"):
        mx.model.load_checkpoint(saved_prefix.parent / "empty" / "other", 0)


@pytest.mark.parametrize(
    ("read", "name", "says"),
    [
        (mx.nd.load, "net-symbol.json", "JSON text; a symbol file is opened with mx.sym.load"),
        (mx.sym.load, "net-0003.params", "a file of parameters, which mx.nd.load opens"),
        (mx.nd.load, "short.pickle", "it is a pickle.*any code"),
        (mx.nd.load, "long.pickle", "it is a pickle.*any code"),
        (mx.sym.load, "long.pickle", "it is a pickle.*any code"),
        (mx.sym.load, "page.json", "a page of HTML.*fetch the file again"),
        (mx.nd.load, "page.params", "a page of HTML.*fetch the file again"),
        (mx.nd.load, "page.safetensors", "a page of HTML"),
        (lambda path: mx.recordio.MXRecordIO(path, "r").read(), "page.rec", "a page of HTML"),
        (mx.image.imread, "page.png", "a page of HTML"),
        (mx.sym.load, "packed.json", "a gzip file; unpack it first"),
        (mx.nd.load, "packed.params", "a gzip file; unpack it first"),
        (mx.sym.load, "noise.json", "not UTF-8 text"),
        (mx.nd.load, "pointer.params", "pointer of Git LFS.*git lfs pull"),
        (mx.sym.load, "pointer.json", "pointer of Git LFS.*git lfs pull"),
        (mx.nd.load, "pointer.safetensors", "pointer of Git LFS.*git lfs pull"),
        (lambda path: mx.recordio.MXRecordIO(path, "r").read(), "pointer.rec", "pointer of Git LFS.*git lfs pull"),
        (mx.image.imread, "pointer.png", "pointer of Git LFS"),
    ],
)
def test_files_that_are_something_else(saved_prefix: Path, read: Callable[[str], Any], name: str, says: str) -> None:
    """Swapped files, pickles, Git LFS pointers, HTML pages and archives raise FormatError with the actual kind."""
    path = saved_prefix.parent / name
    if name.endswith("pickle"):
        path.write_bytes(pickle.dumps({"a": 1} if name.startswith("short") else {"a": list(range(100))}))
    elif name.startswith("pointer"):
        path.write_text(POINTER)
    elif name.startswith("page"):
        path.write_text("\n<!DOCTYPE html><html><body>Not found</body></html>")
    elif name.startswith("packed"):
        path.write_bytes(gzip.compress(b"{}"))
    elif name.startswith("noise"):
        path.write_bytes(bytes(range(128, 256)))
    with pytest.raises(FormatError, match=says):
        read(str(path))


def bind_network(saved_prefix: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return (executor, module, parameters) of the saved network."""
    network, args, _ = mx.model.load_checkpoint(saved_prefix, 3)
    shapes = models.input_shapes("mlp", 1)
    module = mx.mod.Module(network)
    module.bind([("data", shapes["data"])], [("softmax_label", shapes["softmax_label"])])
    return network.simple_bind(mx.cpu(), **shapes), module, args


def test_parameters_of_another_model_are_counted(saved_prefix: Path) -> None:
    """Parameters of another model raise with the number of matching names, and change nothing."""
    executor, module, args = bind_network(saved_prefix)
    first = next(iter(args))
    second = {first: args[first], "stem_weight": mx.nd.ones((2,)), "head_weight": mx.nd.ones((2,))}
    with pytest.raises(BindError, match=r"\['stem_weight', 'head_weight'\] are no arg .*1 of 3 names match"):
        executor.copy_params_from(second)
    assert not executor.arg_dict[first].asnumpy().any()
    with pytest.raises(ParameterError, match=r"unknown names \['stem_weight', 'head_weight'\], 1 of 3 match"):
        module.set_params(second, {})


def test_all_that_is_missing_or_has_another_shape_is_listed(saved_prefix: Path) -> None:
    """One error lists all missing parameters, or all parameters of another shape."""
    executor, module, args = bind_network(saved_prefix)
    first, *others = args
    with pytest.raises(MXNetError) as missing:
        module.init_params(arg_params={first: args[first]}, aux_params={})
    assert all(repr(name) in str(missing.value) for name in others)
    assert "1 of 1 match" in str(missing.value)
    wrong = {name: mx.nd.ones((2,)) for name in args}
    for call in (lambda: executor.copy_params_from(wrong), lambda: module.set_params(wrong, {})):
        with pytest.raises(ShapeError, match=f"{len(args)} parameters have other shapes") as second:
            call()
        assert all(f"{name!r} was bound with shape {args[name].shape}, got (2,)" in str(second.value) for name in args)
    executor.copy_params_from({first: args[first]})
    with pytest.raises(MXNetError, match="never got a value") as unset:
        executor.forward()
    assert all(repr(name) in str(unset.value) for name in others)
