"""``mx.contrib.svrg_optimization``: MXNet's names of the module for variance reduced gradients."""

from weftplan.training.module import svrg_module
from weftplan.training.module.svrg_module import SVRGModule

__all__ = ["SVRGModule", "svrg_module"]
