"""``mx.mod``: modules under the name that MXNet gives them.

The classes stand in ``base_module.py``, ``module.py``, ``bucketing_module.py``, ``sequential_module.py`` and
``python_module.py``; this file owns their public names alone.
"""

from __future__ import annotations

from weftplan.training.module.base_module import BaseModule
from weftplan.training.module.bucketing_module import BucketingModule
from weftplan.training.module.module import Module
from weftplan.training.module.python_module import PythonLossModule, PythonModule
from weftplan.training.module.sequential_module import SequentialModule

__all__ = ["BaseModule", "BucketingModule", "Module", "PythonLossModule", "PythonModule", "SequentialModule"]
