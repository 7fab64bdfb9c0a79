"""The goals of ``bench_torch.py goals``: estimates of whole steps of many libraries, and budgets, against real peaks.

A hook on ``posix_memalign`` counts the bytes of PyTorch's own library; it knows nothing of weftplan. Libraries that are
missing are named, and their cases count as missed.

    pip install -e '.[dev,torch]' expecttest transformers timm torchvision peft accelerate lightning
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_models import UNet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.torch import test_kinds_of_faults as kinds
from tests.torch import test_whole_steps as steps
from tests.torch.allocator_hook import hook
from weftplan.errors import PlanError
from weftplan.torch import budget, estimate
from weftplan.torch.reach import reached_tensors
from weftplan.torch.trade_off import planned

Made = tuple[Callable[..., Any], tuple[Any, ...]]
Loss = tuple[nn.Module, Callable[..., Any], tuple[Any, ...]]
"""A module, a loss function that uses it, and its arguments."""
SHARES = (0.75, 0.5, None)
"""Budgets, as shares of the peak without one; None: the smallest."""
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
LLAMA = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2 LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 64}),
    "BERT": ("Bert ForMaskedLM", {**SMALL, "intermediate_size": 128}),
    "T5": (
        "T5 ForConditionalGeneration",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 500}
        | {"decoder_start_token_id": 0},
    ),
    "Mamba": ("Mamba ForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500}),
    "Llama, attention by matrices": ("Llama ForCausalLM", {**LLAMA, "attn_implementation": "eager"}),
    "Llama, fused attention": ("Llama ForCausalLM", LLAMA),
    "Llama, checkpoints, new kind": ("Llama ForCausalLM", LLAMA),
    "Llama, checkpoints, old kind": ("Llama ForCausalLM", LLAMA),
    "Llama on meta": ("Llama ForCausalLM", LLAMA),
    "Mixtral": ("Mixtral ForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def language_model(name: str) -> nn.Module:
    """Return a small model of the library transformers with random weights."""
    import transformers

    kind, options = FAMILIES[name]
    family, task = kind.split()
    config = getattr(transformers, f"{family}Config")(**options)
    model: nn.Module = getattr(transformers, family + task)(config).train()
    if "checkpoints" in name:
        reentrant = {"use_reentrant": "old" in name}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
    return model


def trained(model: nn.Module, loss: Callable[..., Any], args: tuple[Any, ...]) -> Made:
    """Return a step that trains a model with AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(*args: Any) -> None:
        loss(*args).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, args


def language(name: str, prepare: Callable[[nn.Module], nn.Module] = lambda model: model) -> Loss:
    """Return the loss of a language model."""
    model, words = prepare(language_model(name)), torch.randint(0, 500, (4, 64))
    return model, lambda words: model(input_ids=words, labels=words, use_cache=False).loss, (words,)


def vit() -> Made:
    """A vision transformer of the library transformers."""
    import transformers

    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=64, **config)).train()
    x, y = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4,))
    return trained(model, lambda x, y: model(pixel_values=x, labels=y).loss, (x, y))


def whisper() -> Made:
    """A speech model of the library transformers."""
    import transformers

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 500, "num_mel_bins": 20}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 50, "max_target_positions": 32}
    config = transformers.WhisperConfig(**layers, **widths, **words, **lengths)
    model = transformers.WhisperForConditionalGeneration(config).train()
    x, y = torch.randn(2, 20, 100), torch.randint(0, 500, (2, 16))
    return trained(model, lambda x, y: model(input_features=x, labels=y).loss, (x, y))


def images(name: str) -> Loss:
    """Return the loss of a small image network of the library timm."""
    import timm

    options: dict[str, Any] = {"num_classes": 10}
    if "swin" in name:
        options |= {"img_size": 64, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    if "convnext" in name:
        options |= {"dims": (16, 32, 64, 128), "depths": (1, 1, 2, 1)}
    model = timm.create_model(name, **options).train()
    x, y = torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))
    return model, lambda x, y: F.cross_entropy(model(x), y), (x, y)


def lora() -> Loss:
    """Return the loss of a Llama with low-rank adapters of the library peft."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return language("Llama, fused attention", lambda model: peft.get_peft_model(model, config))


def trainer() -> Made:
    """``Trainer.training_step`` of the library transformers."""
    import transformers

    model, words = language_model("Llama, fused attention"), torch.randint(0, 500, (4, 64))
    arguments = transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True)
    owner = transformers.Trainer(model=model, args=arguments)
    optimizer = torch.optim.AdamW(model.parameters())
    owner.current_gradient_accumulation_steps = 1

    def step(words: Any) -> None:
        owner.training_step(model, {"input_ids": words, "labels": words})
        optimizer.step()
        optimizer.zero_grad()

    return step, (words,)


def lightning() -> Made:
    """``training_step`` of a module of the library lightning."""
    import lightning as library

    class Owner(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    owner = Owner()
    args = torch.randn(64, 64), torch.randint(0, 10, (64,))
    return trained(owner, lambda x, y: owner.training_step((x, y), 0), args)


def accelerated() -> Made:
    """A step with the objects of the library accelerate."""
    from accelerate import Accelerator

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    owner = Accelerator(cpu=True)
    model, optimizer = owner.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(x: Any) -> None:
        owner.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(64, 64),)


def accumulated() -> Made:
    """Gradients of four parts of a batch."""
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    return trained(model, lambda x: sum(model(part).square().mean() for part in x.chunk(4)), (torch.randn(64, 128),))


def parallel() -> Made:
    """``DataParallel`` on a machine without a card."""
    model = nn.DataParallel(nn.Linear(128, 128))
    return trained(model, lambda x: model(x).square().mean(), (torch.randn(64, 128),))


def compiled(whole: bool) -> Made:
    """A compiled module as the model (``whole``), or a module after ``compile()``."""
    model: Any = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    if whole:
        model = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    return trained(model, lambda x: model(x).square().mean(), (torch.randn(64, 128),))


def muon() -> Made:
    """The optimizer Muon, for matrices."""
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False))
    optimizer = torch.optim.Muon(model.parameters())

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(32, 128),)


def distributed(sharded: bool) -> Made:
    """One process of ``DistributedDataParallel``, or of ``fully_shard``."""
    if not torch.distributed.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        torch.distributed.init_process_group("gloo", meeting, rank=0, world_size=1)
    model: nn.Module = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    if sharded:
        torch.distributed.fsdp.fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return trained(model, lambda x: model(x).square().mean(), (torch.randn(64, 128),))


def perceptron() -> Loss:
    """Return the loss of a perceptron under autocast to bfloat16."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])

    def loss(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    return model, loss, (torch.randn(256, 128),)


def messages() -> Loss:
    """Return the loss of a graph network."""
    edges, model = torch.randint(0, 200, (2, 1000)), nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))

    def loss(x: Any) -> Any:
        h = model[0](x)
        h = torch.zeros(200, 64).index_add(0, edges[1], h[edges[0]]).relu()
        return F.cross_entropy(model[1](h), torch.arange(200) % 8)

    return model, loss, (torch.randn(200, 32),)


def denoiser() -> Loss:
    """Return the loss of a U-Net that predicts noise."""
    model = UNet(8)
    model.last = nn.Conv2d(8, 3, 1)
    return model, lambda x, noise: F.mse_loss(model(x + noise), noise), tuple(torch.randn(2, 2, 3, 64, 64))


LOSSES: dict[str, Callable[[], Loss]] = {
    "BERT": lambda: language("BERT"),
    "graph network": messages,
    "Llama": lambda: language("Llama, fused attention"),
    "LoRA": lora,
    "perceptron, bfloat16": perceptron,
    "ConvNeXt": lambda: images("convnext_tiny"),
    "U-Net": denoiser,
}
"""The models whose budgets are checked."""


def optimized(name: str) -> Callable[[], Made]:
    """Return the case of an optimizer of PyTorch."""
    return lambda: steps.updated(name)


CASES: dict[str, Callable[[], Made]] = {
    **{name: lambda name=name: trained(*language(name)) for name in FAMILIES},  # type: ignore[misc]
    "ViT": vit,
    "Whisper": whisper,
    "ConvNeXt": lambda: trained(*images("convnext_tiny")),
    "EfficientNet-B0": lambda: trained(*images("efficientnet_b0")),
    "Swin": lambda: trained(*images("swin_tiny_patch4_window7_224")),
    "LoRA": lambda: trained(*lora()),
    "Trainer.training_step": trainer,
    "LightningModule.training_step": lightning,
    "accelerate": accelerated,
    "graph network": steps.graph_network,
    "autocast to bfloat16": steps.mixed_precision,
    "accumulation": accumulated,
    **{name: optimized(name) for name in ("AdamW, foreach", "AdamW, fused", "SGD, momentum", "RAdam", "NAdam")},
    **{name: optimized(name) for name in ("AMSGrad", "RMSprop, centred")},
    "Muon": muon,
    "own 8-bit Adam": steps.own_optimizer,
    "averaged weights": steps.averaged_weights,
    "two losses, smoothing, two clippings": steps.two_losses,
    "generator and discriminator": steps.adversaries,
    "U-Net": steps.diffusion,
    "DataParallel": parallel,
    "DistributedDataParallel": lambda: distributed(False),
    "fully_shard": lambda: distributed(True),
    "GradScaler": kinds.scaled_gradients,
    "Adafactor": kinds.value_reads_of_pytorch,
    "LBFGS": kinds.closures_of_lbfgs,
    "module.compile()": lambda: compiled(False),
    "torch.compile(module)": lambda: compiled(True),
}


def truth(name: str) -> tuple[int, int | str]:
    """Return the real peak in bytes of a case's late step, and its estimate or the sentence that refuses it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    gc.collect()
    before = hook().live
    step, args = CASES[name]()
    for _ in range(2 if name == "LBFGS" else 7):
        step(*args)
    gc.collect()
    real = hook().live - before + hook().peak(step, *args)
    if "meta" in name:
        with torch.device("meta"):
            step, args = CASES[name]()
    try:
        return real, estimate(step, *args).peak
    except PlanError as error:
        return real, str(error).splitlines()[0]


def used(name: str, share: float | None) -> tuple[int, int]:
    """Return a budget, a share of the peak without one or the smallest (None), and the bytes that the step takes."""
    torch.manual_seed(0)
    model, loss, args = LOSSES[name]()
    plan = planned(loss, args)[1]
    limit = plan.smallest if share is None else max(plan.smallest, int(share * plan.plain))
    step = budget(loss, limit)
    for _ in range(2):
        step(*args).backward()
        model.zero_grad()
    gc.collect()
    fixed = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reached_tensors(loss, args)}
    return limit, sum(fixed.values()) + hook().peak(lambda: step(*args).backward())


def bench_kept() -> None:
    """Print budgets with the bytes that the steps take, and how many are kept."""
    kept = 0
    for name in LOSSES:
        for share in SHARES:
            torch._dynamo.reset()
            limit, real = used(name, share)
            kept += real <= limit
            print(
                f"{name:22} budget {limit:>12,} real {real:>12,} {'kept' if real <= limit else 'EXCEEDED'}", flush=True
            )
    print(f"{kept} of {len(LOSSES) * len(SHARES)} budgets kept (goal: all)")


def bench_truth() -> None:
    """Print estimate and real peak of every case, and how many are within 0.1 %."""
    near = []
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in CASES:
        try:
            real, answer = truth(name)
        except ImportError as error:
            print(f"{name:38} {error}", flush=True)
            continue
        if isinstance(answer, str):
            print(f"{name:38} real {real:>12,} refused: {answer[:150]}", flush=True)
            continue
        near += [name] if abs(answer / real - 1) <= 0.001 else []
        print(f"{name:38} real {real:>12,} estimate {answer:>12,} {answer / real:.4f}", flush=True)
    print(f"{len(near)} of {len(CASES)} cases within 0.1 % (goal 40)")
