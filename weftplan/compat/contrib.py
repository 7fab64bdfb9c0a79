"""``mx.contrib``: operators of arrays and symbols that MXNet calls contributed.

It owns names only; the functions are those of ``ndarray`` and ``symbol``.
"""

from weftplan.ndarray.operators import NAMESPACES
from weftplan.symbol.namespaces import contrib

__all__ = ["nd", "ndarray", "sym", "symbol"]

ndarray = nd = NAMESPACES["contrib"]
symbol = sym = contrib
