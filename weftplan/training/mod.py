"""``mx.mod``: public names of the modules.

This file owns only the names. The classes are in ``base_module.py``, ``module.py``, ``bucketing_module.py``,
``sequential_module.py`` and ``python_module.py``.
"""

from __future__ import annotations

from weftplan.training.module.base_module import BaseModule
from weftplan.training.module.bucketing_module import BucketingModule
from weftplan.training.module.module import Module
from weftplan.training.module.python_module import PythonLossModule, PythonModule
from weftplan.training.module.sequential_module import SequentialModule

__all__ = ["BaseModule", "BucketingModule", "Module", "PythonLossModule", "PythonModule", "SequentialModule"]
