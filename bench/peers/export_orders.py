"""Record the graphs of published networks for ``bench_order.py``; needs PyTorch, timm and transformers.

    python bench/peers/export_orders.py [NAME ...]

A record has the nodes of ``torch.export`` in its order, for inference of one sample with random weights: the inputs and
bytes of each node and what it may do with its first input. Functions of elements and normalisations may work in place.
No weights are stored.
"""

import gzip
import json
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "data" / "orders"
VIEWS = {"view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze",
         "squeeze", "flatten", "alias", "detach", "unflatten", "contiguous", "dropout", "split", "chunk",
         "to"}  # fmt: skip
IN_PLACE = {"relu", "relu_", "gelu", "silu", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "tanh", "add", "add_",
            "mul", "sub", "div", "batch_norm", "layer_norm", "softmax", "hardswish_", "silu_", "pow"}  # fmt: skip


def timm_network(name, side):
    """Return a function that makes a network of timm and its input."""

    def make():
        import timm

        return timm.create_model(name, pretrained=False), (torch.zeros(1, 3, side, side),)

    return make


def language_network(causal):
    """Return a function that makes a GPT-2 or BERT of four layers and its input of 128 tokens."""

    def make():
        import transformers

        ids = (torch.zeros(1, 128, dtype=torch.long),)
        if causal:
            config = transformers.GPT2Config(n_layer=4, use_cache=False, attn_implementation="eager")
            return transformers.GPT2LMHeadModel(config), ids
        config = transformers.BertConfig(num_hidden_layers=4, attn_implementation="eager")
        return transformers.BertModel(config), ids

    return make


NETWORKS = {
    "resnet50": timm_network("resnet50", 224),
    "pnasnet5": timm_network("pnasnet5large", 331),
    "nasnet": timm_network("nasnetalarge", 331),
    "inception_v3": timm_network("inception_v3", 299),
    "densenet121": timm_network("densenet121", 224),
    "mobilenet_v3": timm_network("mobilenetv3_large_100", 224),
    "gpt2": language_network(True),
    "bert": language_network(False),
}


def nbytes(value):
    """Return the bytes of a tensor, or of all tensors of a tuple; 0 for other values."""
    if isinstance(value, (tuple, list)):
        return sum(map(nbytes, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def record(module, inputs):
    """Return the nodes of an exported network: [kind, input numbers, bytes]; kind is v, n, i (in place) or o (over)."""
    exported = torch.export.export(module.eval(), inputs, strict=False)
    nodes, number = [], {}
    for node in exported.graph.nodes:
        if node.op == "output":
            heads = [number[one] for one in node.all_input_nodes if one in number]
            return {"nodes": nodes, "heads": heads}
        reads = [number[one] for one in node.all_input_nodes]
        size = nbytes(node.meta.get("val"))
        name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
        name = name.split(".")[0]
        kind = "v" if node.op == "placeholder" else "n"
        if kind == "n" and reads and (name in VIEWS or name == "getitem"):
            kind = "o"
            size = min(size, nodes[reads[0]][2])
        elif kind == "n" and name in IN_PLACE and reads and nodes[reads[0]][2] == size:
            kind = "i"
        number[node] = len(nodes)
        nodes.append([kind, reads, size])
    raise AssertionError("a graph without an output")


def main(names):
    """Write a file for each network."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or NETWORKS:
        text = json.dumps(record(*NETWORKS[name]()), separators=(",", ":"))
        (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(name, len(text), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
