"""``mx.mod``: modules under the name that MXNet gives them.

The classes stand in ``base_module.py``, ``module.py``, ``bucketing_module.py``, ``sequential_module.py`` and
``python_module.py``; this file owns their public names alone.
"""

from __future__ import annotations

from weftplan.training.base_module import BaseModule
from weftplan.training.bucketing_module import BucketingModule
from weftplan.training.module import Module
from weftplan.training.python_module import PythonLossModule, PythonModule
from weftplan.training.sequential_module import SequentialModule

__all__ = ["BaseModule", "BucketingModule", "Module", "PythonLossModule", "PythonModule", "SequentialModule"]
