"""Say whether training steps of PyTorch fit a card, and run them within a memory budget.

:func:`fits` answers for a card, by a table that :func:`on_card` and :func:`scratch_on_card` extend.
:func:`budget` runs a module or function within a budget; :func:`backend` and :func:`partition` do this for
``torch.compile`` and for other backends. :func:`curve` shows the time that each budget costs, and :func:`estimate`
predicts the peak of any step. PyTorch is imported on first use of one of these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weftplan.support.lazy_import import late_import

if TYPE_CHECKING:
    from weftplan.torch.card_forecast import fits
    from weftplan.torch.card_rules import on_card, scratch_on_card
    from weftplan.torch.fit import backend, budget, partition
    from weftplan.torch.prediction import estimate
    from weftplan.torch.trade_off import curve

__all__ = [
    "backend",
    "budget",
    "curve",
    "estimate",
    "fits",
    "on_card",
    "partition",
    "scratch_on_card",
]

_OWNERS = {"backend": "fit", "budget": "fit", "partition": "fit"}
_OWNERS |= {"curve": "trade_off", "estimate": "prediction"}
_OWNERS |= {"fits": "card_forecast", "on_card": "card_rules", "scratch_on_card": "card_rules"}


def __getattr__(name: str) -> Any:
    """Import PyTorch and the module that defines ``name``; return the object of that name."""
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from weftplan.torch.private import check_version
    except ModuleNotFoundError as error:
        if error.name == "torch":
            error.msg = "weftplan.torch needs PyTorch: pip install 'weftplan[torch]'"
        raise
    check_version()
    globals()[name] = value = getattr(late_import(f"weftplan.torch.{_OWNERS[name]}"), name)
    return value
