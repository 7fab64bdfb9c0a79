"""Bytes that a process takes on a GPU outside its allocator, by the card's architecture.

The module has no state; any thread may call it.
"""

from __future__ import annotations

_MIB = 1 << 20
ARCHITECTURES = {
    "volta": (("V100",), (300, 1000)),
    "turing": (("T4", "RTX 20"), (300, 1000)),
    "ampere": (("A10", "A100", "RTX 30"), (360, 1440)),
    "ada": (("L4", "L40S", "RTX 40"), (360, 640)),
    "hopper": (("H100", "H200"), (420, 640)),
    "blackwell": (("RTX 50", "B200"), (420, 760)),
}
"""Prefixes of cards, and the MiB that a process takes outside its allocator: CUDA context, kernels and libraries.

Sources: 300 to 400 MiB if kernels are loaded on first use, the default since CUDA 12, above 1,000 MiB without, before
CUDA 11.7 (PyTorch's tracker, numbers 107667 and 109888); 636 MiB if all are loaded (PyTorch, pull request 86509);
426 MiB on an RTX 6000 Ada (unsloth-zoo, number 1053, with PyTorch 2.10); about 1,430 MiB on an A100 (records of
GPUMemNet, fitted). An end without a record is that of the next older kind."""


def architecture(card: str) -> str | None:
    """Return the architecture of a card, whose longest prefix in the table decides; None for a size of memory."""
    matches = [(len(p), arch) for arch, (prefixes, _) in ARCHITECTURES.items() for p in prefixes if card.startswith(p)]
    return max(matches)[1] if matches else None


def context_range(card: str) -> tuple[int, int]:
    """Return the range of bytes outside the allocator; that of all architectures for a size of memory.

    >>> [nbytes // 2**20 for nbytes in context_range("RTX 4090")]
    [360, 640]
    """
    ranges = [ends for arch, (_, ends) in ARCHITECTURES.items() if architecture(card) in (arch, None)]
    return min(low for low, _ in ranges) * _MIB, max(high for _, high in ranges) * _MIB
