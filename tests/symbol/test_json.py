"""Symbol files: writing, reading, older versions and invalid files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from weftplan import symbol as sym
from weftplan.errors import FormatError, MXNetError, ParameterError, UnknownOperatorError


def network() -> sym.Symbol:
    """Return a symbol with hidden outputs, auxiliary states and attributes."""
    with sym.AttrScope(ctx_group="dev1"):
        x = sym.FullyConnected(sym.Variable("data"), num_hidden=4, name="fc1")
        x = sym.BatchNorm(x, name="bn")
    return sym.Group([sym.Dropout(x, p=0.5, name="drop"), sym.exp(x, name="e")])


def edited(change: Any) -> str:
    """Return the JSON of :func:`network` after ``change(data)`` has changed it."""
    data = json.loads(network().tojson())
    change(data)
    return json.dumps(data)


def test_round_trip(tmp_path: Path) -> None:
    """A symbol read from text or from a file has equal text, lists, attributes and shapes."""
    x = network()
    x.save(tmp_path / "net-symbol.json")
    for y in (sym.load_json(x.tojson()), sym.load(tmp_path / "net-symbol.json")):
        assert y.tojson() == x.tojson()
        assert y.list_arguments() == x.list_arguments()
        assert y.list_auxiliary_states() == x.list_auxiliary_states()
        assert y.attr_dict() == x.attr_dict()
        assert y.debug_str() == x.debug_str()
        assert y.infer_shape(data=(2, 3)) == x.infer_shape(data=(2, 3))
    assert [p.name for p in tmp_path.iterdir()] == ["net-symbol.json"]


def test_structure() -> None:
    """Row pointers count hidden outputs, the version is MXNet 1.9.1's, and auxiliary inputs have version 1."""
    data = json.loads(network().tojson())
    names = [node["name"] for node in data["nodes"]]
    assert data["attrs"] == {"mxnet_version": ["int", 10901]}
    row = data["node_row_ptr"]
    assert row[names.index("bn") + 1] - row[names.index("bn")] == 3
    assert row[names.index("drop") + 1] - row[names.index("drop")] == 2
    assert len(row) == len(names) + 1
    assert [names[i] for i in data["arg_nodes"]] == network().list_inputs()
    assert [entry[2] for entry in data["nodes"][names.index("bn")]["inputs"]] == [0, 0, 0, 1, 1]


def test_save_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If saving fails, the old file is unchanged, and no other file is left."""
    path = tmp_path / "x.json"
    network().save(path)
    before = path.read_text()

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        sym.Variable("other").save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated(cut: float, tmp_path: Path) -> None:
    """A truncated file raises a FormatError with the file and the line."""
    text = network().tojson()
    path = tmp_path / "cut-symbol.json"
    path.write_text(text[: int(cut * len(text))])
    with pytest.raises(FormatError, match=r"cut-symbol\.json: not valid JSON at line \d+"):
        sym.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("nodes"), "'nodes' must be a list"),
        (lambda d: d.update(heads=[]), "no heads"),
        (lambda d: d.update(heads=[[99, 0, 0]]), r"\[99, 0, 0\] refers to no node"),
        (lambda d: d.update(heads=[[3, 7, 0]]), "output 7 of 'fc1', which has 1"),
        (lambda d: d["nodes"][3].update(inputs=[[0, 0, 0]]), r"'fc1' \(FullyConnected\) has 1 input"),
        (lambda d: d["nodes"][3].update(inputs=[[0]]), r"expected \[node, output\]"),
        (lambda d: d["nodes"][3]["inputs"].__setitem__(0, [3, 0, 0]), "cycle: 'fc1' <- 'fc1'"),
        (lambda d: d["nodes"][0].update(inputs=[[1, 0, 0]]), "a variable has 1 inputs"),
        (lambda d: d["nodes"][0].pop("name"), "node 0: 'op' and 'name' must be text"),
        (lambda d: d["nodes"].__setitem__(1, 7), "node 1: expected an object"),
        (lambda d: d["nodes"][3].update(attrs={"num_hidden": 4}), "object of texts"),
        (lambda d: d["nodes"][3].update(control_deps=[500]), "control_deps"),
        (lambda d: d["attrs"].update(mxnet_version="1.9"), "mxnet_version"),
    ],
)
def test_malformed(change: Any, message: str) -> None:
    """Each kind of damage raises a FormatError with the fault and its position."""
    with pytest.raises(FormatError, match=message):
        sym.load_json(edited(change))


def test_files_of_other_kinds(tmp_path: Path) -> None:
    """A file that is no text raises a FormatError that names the file; a byte order mark is accepted."""
    path = tmp_path / "model-0000.params"
    path.write_bytes(b"\x12\x01\xff\xfe")
    with pytest.raises(FormatError, match=r"model-0000\.params: not UTF-8 text .* expected a -symbol\.json file"):
        sym.load(path)
    marked = tmp_path / "marked-symbol.json"
    marked.write_bytes(b"\xef\xbb\xbf" + sym.Variable("x").tojson().encode())
    assert sym.load(marked).list_arguments() == ["x"]


def test_attributes_of_operators_without_parameters() -> None:
    """An operator without parameters keeps unknown attributes, as in MXNet; one with parameters raises an error."""
    text = (sym.exp(sym.Variable("x"), name="e") + 1).tojson()
    data = json.loads(text)
    data["nodes"][1]["attrs"] = {"group": "left"}
    assert sym.load_json(json.dumps(data)).attr_dict()["e"] == {"group": "left"}
    data["nodes"][2]["attrs"]["group"] = "left"
    with pytest.raises(ParameterError, match="'group'"):
        sym.load_json(json.dumps(data))


def test_not_a_symbol() -> None:
    """JSON that is no symbol, or nested too deeply, raises a FormatError; bytes raise a TypeError."""
    for text in ("[]", "3", "{}", '{"nodes": {}}'):
        with pytest.raises(FormatError):
            sym.load_json(text)
    with pytest.raises(FormatError, match="nested too deeply"):
        sym.load_json("[" * 200_000)
    with pytest.raises(TypeError, match="expects text"):
        sym.load_json(b"{}")


def test_a_long_cycle_is_found_without_recursion() -> None:
    """A cycle of 50,000 nodes raises a FormatError."""
    count = 50_000
    nodes = [{"op": "exp", "name": f"n{i}", "inputs": [[(i + 1) % count, 0, 0]]} for i in range(count)]
    with pytest.raises(FormatError, match="cycle"):
        sym.load_json(json.dumps({"nodes": nodes, "heads": [[0, 0, 0]], "arg_nodes": []}))


def test_unknown_operator_names_the_node() -> None:
    """Inference with an unknown operator raises an error that names the operator, the node and a similar name."""
    loaded = sym.load_json(edited(lambda d: d["nodes"][3].update(op="FullyConected")))
    with pytest.raises(UnknownOperatorError, match=r"FullyConected \(1 node: fc1; did you mean 'FullyConnected'\?\)"):
        loaded.infer_shape(data=(2, 3))


def test_bad_parameter_names_the_node() -> None:
    """A parameter that cannot be parsed raises an error that names the node."""
    with pytest.raises(ParameterError, match=r"FullyConnected.*'fc1'.*num_hidden='four'"):
        sym.load_json(edited(lambda d: d["nodes"][3]["attrs"].update(num_hidden="four")))


def test_random_damage_never_escapes() -> None:
    """Deleting any single character of a file gives a symbol or an MXNetError."""
    text = json.dumps(json.loads(sym.FullyConnected(sym.Variable("d"), num_hidden=4, name="f").tojson()))
    for i in range(len(text)):
        with contextlib.suppress(MXNetError):
            sym.load_json(text[:i] + text[i + 1 :])


OLD = {
    "nodes": [
        {"op": "null", "param": {}, "name": "data", "inputs": [], "backward_source_id": -1},
        {"op": "null", "param": {}, "name": "fc_weight", "inputs": [], "backward_source_id": -1},
        {
            "op": "null",
            "param": {},
            "name": "fc_bias",
            "inputs": [],
            "backward_source_id": -1,
            "attr": {"lr_mult": "2"},
        },
        {
            "op": "FullyConnected",
            "param": {"no_bias": "False", "num_hidden": "3"},
            "name": "fc",
            "inputs": [[0, 0], [1, 0], [2, 0]],
            "backward_source_id": -1,
            "attr": {"ctx_group": "dev1", "weight_lr_mult": "1.2"},
        },
        {"op": "null", "param": {}, "name": "bn_gamma", "inputs": [], "backward_source_id": -1},
        {"op": "null", "param": {}, "name": "bn_beta", "inputs": [], "backward_source_id": -1},
        {
            "op": "BatchNorm",
            "param": {"eps": "0.001", "fix_gamma": "True", "momentum": "0.9"},
            "name": "bn",
            "inputs": [[3, 0], [4, 0], [5, 0]],
            "backward_source_id": -1,
        },
        {"op": "argmax", "param": {"axis": "-1"}, "name": "best", "inputs": [[6, 0]], "backward_source_id": -1},
    ],
    "arg_nodes": [0, 1, 2, 4, 5],
    "heads": [[7, 0]],
}
"""A file of a release before 0.9."""


def test_files_before_0_9() -> None:
    """A file of a release before 0.9 is read.

    It has entries of two numbers, ``param`` and ``attr``, no auxiliary states, multipliers without underscores, and an
    axis of -1 for None.
    """
    x = sym.load_json(json.dumps(OLD))
    assert x.list_arguments() == ["data", "fc_weight", "fc_bias", "bn_gamma", "bn_beta"]
    assert x.list_auxiliary_states() == ["bn_moving_mean", "bn_moving_var"]
    attrs = x.attr_dict()
    assert attrs["fc"]["__ctx_group__"] == "dev1"
    assert attrs["fc_weight"]["__lr_mult__"] == "1.2"
    assert "weight_lr_mult" not in attrs["fc"]
    assert attrs["fc_bias"]["__lr_mult__"] == "2"
    assert attrs["bn_moving_var"]["__init__"] == '["one", {}]'
    assert "best" not in attrs
    assert x.infer_shape(data=(2, 5))[1] == [(1,)]
    assert sym.load_json(x.tojson()).tojson() == x.tojson()


def test_multipliers_of_shared_inputs() -> None:
    """``weight_lr_mult`` of an old operator becomes ``lr_mult`` of its second input, also of a shared variable."""
    data: dict[str, Any] = {
        "nodes": [
            {"op": "null", "name": "d", "inputs": []},
            {"op": "null", "name": "shared", "inputs": []},
            {
                "op": "FullyConnected",
                "name": "fc",
                "attr": {"no_bias": "True", "num_hidden": "3", "weight_lr_mult": "2", "bias_wd_mult": "4"},
                "inputs": [[0, 0], [1, 0]],
            },
        ],
        "arg_nodes": [0, 1],
        "heads": [[2, 0]],
        "attrs": {"mxnet_version": ["int", 904]},
    }
    attrs = sym.load_json(json.dumps(data)).attr_dict()
    assert attrs["shared"]["__lr_mult__"] == "2"
    assert attrs["fc"] == {"no_bias": "True", "num_hidden": "3", "bias_wd_mult": "4"}


def test_files_of_0_9_to_1_0() -> None:
    """Files of 0.9 to 1.0 have ``attr`` instead of ``attrs``; from 0.9.5 on, axis -1 means the last axis."""
    data: dict[str, Any] = {
        "nodes": [
            {"op": "null", "name": "d", "inputs": []},
            {"op": "argmax", "name": "best", "attr": {"axis": "-1"}, "inputs": [[0, 0, 0]]},
        ],
        "arg_nodes": [0],
        "node_row_ptr": [0, 1, 2],
        "heads": [[1, 0, 0]],
        "attrs": {"mxnet_version": ["int", 905]},
    }
    assert sym.load_json(json.dumps(data)).infer_shape(d=(2, 3))[1] == [(2,)]
    data["attrs"]["mxnet_version"][1] = 904
    assert sym.load_json(json.dumps(data)).infer_shape(d=(2, 3))[1] == [(1,)]


@pytest.mark.parametrize(("version", "expected"), [(903, '["one", {}]'), (904, None)])
def test_default_initializers_of_old_files(version: int, expected: str | None) -> None:
    """Files before 0.9.4 do not say how states begin, so the operator's default is added; later files say it."""
    data: dict[str, Any] = {
        "nodes": [{"op": "null", "name": name, "inputs": []} for name in ("d", "gamma", "beta", "mean", "var")]
        + [{"op": "BatchNorm", "name": "bn", "attr": {}, "inputs": [[k, 0, 0] for k in range(5)]}],
        "arg_nodes": [0, 1, 2, 3, 4],
        "node_row_ptr": [0, 1, 2, 3, 4, 5, 8],
        "heads": [[5, 0, 0]],
        "attrs": {"mxnet_version": ["int", version]},
    }
    attrs = sym.load_json(json.dumps(data)).attr_dict()
    assert attrs.get("var", {}).get("__init__") == expected


def test_strings_survive() -> None:
    """Names and attributes with quotes, backslashes, control characters and other alphabets survive a round trip."""
    odd = 'a"b\\c\n\t\r ü 日本'
    x = sym.Variable(odd, attr={"__k__": odd})
    assert sym.load_json(x.tojson()).tojson() == x.tojson()
    assert json.loads(x.tojson())["nodes"][0]["name"] == odd


def test_debug_text() -> None:
    """``debug_str`` of a variable, and of a small graph, is MXNet's text."""
    a = sym.Variable("a")
    assert a.debug_str() == "Variable:a\n"
    text = sym.FullyConnected(a, num_hidden=2, no_bias=True, name="fc").debug_str()
    assert text == (
        "Symbol Outputs:\n\toutput[0]=fc(0)\nVariable:a\nVariable:fc_weight\n--------------------\n"
        "Op:FullyConnected, Name=fc\nInputs:\n\targ[0]=a(0) version=0\n\targ[1]=fc_weight(0) version=0\n"
        "Attrs:\n\tno_bias=True\n\tnum_hidden=2\n"
    )
