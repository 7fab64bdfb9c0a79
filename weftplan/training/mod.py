"""``mx.mod``: modules under the name that MXNet gives them."""

from __future__ import annotations

from weftplan.training.base_module import BaseModule
from weftplan.training.bucketing_module import BucketingModule
from weftplan.training.module import Module

__all__ = ["BaseModule", "BucketingModule", "Module"]
