"""Memory budgets of GPU models, for planning on a machine without the GPU.

A card sold as "8 GB" has 8 GiB. The CUDA context and library workspaces use part of it; plans do not count them, so
:func:`card_budget` subtracts the upper end of :func:`context_range` and an estimate of the workspaces. The module has
no state; any thread may call it. Sources:

* Memory: the makers' product pages. With ECC, a card with GDDR memory reserves a sixteenth of it for check bits.
* CUDA context: :mod:`weftplan.device.cuda_context`.
* cuBLAS: 32 MiB for each worker thread of the device (:mod:`weftplan.device.cublas`).
* NCCL: 4 MiB for each channel and direction (its manual, ``NCCL_BUFFSIZE``), with up to 32 channels.
"""

from __future__ import annotations

from weftplan.device.amounts import amount, bytes_of
from weftplan.device.cuda_context import context_range
from weftplan.errors import PlanError, did_you_mean

GIB, MIB = 1 << 30, 1 << 20
LIBRARIES = 128 * MIB
"""Bytes of the workspaces of cuBLAS and cuDNN, for a few handles."""
EXCHANGE = 2 * 32 * 4 * MIB
"""Bytes of NCCL's buffers if several devices exchange gradients."""
CARDS = {
    "RTX 3060": 12, "RTX 3070": 8, "RTX 3080": 10, "RTX 3090": 24,
    "RTX 4060": 8, "RTX 4060 Ti": 8, "RTX 4070": 12, "RTX 4080": 16, "RTX 4090": 24,
    "RTX 5070": 12, "RTX 5080": 16, "RTX 5090": 32,
    "T4": 16, "A10": 24, "L4": 24, "L40S": 48,
    "V100 16GB": 16, "V100 32GB": 32, "A100 40GB": 40, "A100 80GB": 80, "H100": 80, "H200": 141,
}  # fmt: skip
"""GiB of memory by card name."""
CHECKED = {"T4", "A10", "L4", "L40S"}
"""Cards with GDDR memory and ECC, which reserve a sixteenth of their memory for check bits."""


def card_memory(card: str) -> tuple[str, int]:
    """Return a card's name and the bytes of its memory; raise PlanError with the nearest names if it is unknown.

    >>> card_memory("rtx 4090")
    ('RTX 4090', 25769803776)
    """
    if not isinstance(card, str):
        raise PlanError(f"a card is a name or a size as text, such as 'RTX 4090' or '8GB', got {card!r}")
    names = {name.lower(): name for name in CARDS}
    name = names.get(" ".join(card.lower().split()))
    if name is not None:
        return name, CARDS[name] * GIB - (CARDS[name] * GIB // 16 if name in CHECKED else 0)
    try:
        return f"a card of {card.strip()}", bytes_of(card.upper().replace("GIB", "GB").replace("GB", "GiB"))
    except PlanError:
        hint = did_you_mean(card.upper(), CARDS)
        raise PlanError(
            f"no card {card!r} is known; {hint}give its memory, such as 8GB, or one of {', '.join(CARDS)}"
        ) from None


def card_budget(card: str, devices: int = 1) -> tuple[int, str]:
    """Return the bytes of a card that a plan may use, and a sentence with the calculation.

    Args:
        card: a name such as ``RTX 4070``, or the size of the card's memory, such as ``8GB``, which means 8 GiB.
        devices: number of devices that exchange gradients.

    Raises:
        PlanError: the card is unknown, or the reserved bytes exceed its memory.

    >>> card_budget("RTX 4070")
    (12079595520, 'RTX 4070: 12.00 GiB, less 768.00 MiB for the CUDA context and libraries: 11.25 GiB')
    >>> card_budget("8GB")[1]
    'a card of 8GB: 8.00 GiB, less 1.53 GiB for the CUDA context and libraries: 6.47 GiB'
    """
    name, memory = card_memory(card)
    reserve = context_range(name)[1] + LIBRARIES + (EXCHANGE if devices > 1 else 0)
    budget = memory - reserve
    if budget <= 0:
        raise PlanError(
            f"{name} has {amount(memory)}, and the CUDA context and libraries alone take {amount(reserve)}; give the "
            f"memory of the card with its unit, such as 8GB"
        )
    exchange = ", libraries and NCCL" if devices > 1 else " and libraries"
    return budget, (
        f"{name}: {amount(memory)}, less {amount(reserve)} for the CUDA context{exchange}: {amount(budget)}"
    )
