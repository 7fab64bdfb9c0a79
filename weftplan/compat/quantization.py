"""`mx.contrib.quantization`: can be imported, as scripts do for a rare branch; its functions are absent on purpose."""

from typing import NoReturn

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    if not name.lower().startswith(("quantize", "calib", "combine_histogram")):
        raise AttributeError(f"mx.contrib.quantization has no attribute {name!r}")
    # No AttributeError: ``from mx.contrib.quantization import name`` would replace its text by "cannot import name".
    raise ModuleNotFoundError(
        f"mx.contrib.quantization.{name} is absent on purpose: operators quantize and dequantize, but networks are not "
        f"calibrated or run in int8"
    )
