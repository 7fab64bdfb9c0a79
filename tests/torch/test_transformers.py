"""Models of the library transformers, if it is installed: estimates, and a budget."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")
models = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

from tests.torch.allocator_hook import hook  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.torch import budget, estimate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
SMALL |= {"intermediate_size": 128}
LLAMA = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 64}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert MaskedLM", SMALL),
    "GPT-2": ("GPT2 LMHeadModel", GPT2),
    "Llama": ("Llama CausalLM", LLAMA),
    "Llama, attention by matrices": ("Llama CausalLM", {**LLAMA, "attn_implementation": "eager"}),
    "Llama, checkpoints": ("Llama CausalLM", LLAMA),
    "Mamba": ("Mamba CausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500}),
    "Mistral": ("Mistral CausalLM", {**LLAMA, "sliding_window": 16}),
    "Qwen2": ("Qwen2 CausalLM", LLAMA),
    "T5": ("T5 ConditionalGeneration", {**T5, "vocab_size": 500}),
}


def language_model(name: str) -> Any:
    """Return a small model with random weights."""
    family, _, task = CASES[name][0].partition(" ")
    kind = getattr(models, family + (task if task == "LMHeadModel" else f"For{task}"))
    model = kind(getattr(models, f"{family}Config")(**CASES[name][1])).train()
    if "checkpoints" in name:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("name", CASES)
def test_estimates_of_language_models(name: str) -> None:
    """The estimate is within 0.01 % of the allocator's peak in the third step."""
    torch.manual_seed(0)
    gc.collect()
    before = hook().live
    model, ids = language_model(name), torch.randint(0, 500, (4, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(ids: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(ids)
    gc.collect()
    real = hook().live - before + hook().peak(step, ids)
    assert estimate(step, ids).peak == pytest.approx(real, rel=1e-4)


def test_gpt2_within_a_budget() -> None:
    """A logger's call in the model breaks no graph, and the budget holds."""
    torch.manual_seed(0)
    model, ids = language_model("GPT-2"), torch.randint(0, 500, (4, 64))

    def loss(ids: Any) -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    step = budget(loss, "1GB")
    step(ids).backward()
    smaller = budget(loss, int(0.75 * step.plans[0].plain))
    smaller(ids).backward()
    model.zero_grad()
    gc.collect()
    fixed = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), ids))
    assert hook().peak(lambda: smaller(ids).backward()) + fixed <= smaller.plans[0].budget
