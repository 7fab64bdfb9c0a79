"""``mx.mod``: modules under the name that MXNet gives them.

The classes stand in ``base_module.py``, ``module.py`` and ``bucketing_module.py``; this file owns their public names
alone.
"""

from __future__ import annotations

from weftplan.training.base_module import BaseModule
from weftplan.training.bucketing_module import BucketingModule
from weftplan.training.module import Module

__all__ = ["BaseModule", "BucketingModule", "Module"]
