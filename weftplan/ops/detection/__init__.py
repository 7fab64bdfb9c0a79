"""Operators of object detectors: boxes, suppression, anchors, regions.

Importing this package registers the operators. Each module has one family of operators.
"""

import weftplan.ops.detection.boxes
import weftplan.ops.detection.deformable_psroi
import weftplan.ops.detection.encoding
import weftplan.ops.detection.multibox
import weftplan.ops.detection.multibox_target
import weftplan.ops.detection.proposal
import weftplan.ops.detection.psroi_pooling
import weftplan.ops.detection.roi_align
import weftplan.ops.detection.rroi_align
import weftplan.ops.detection.suppression  # noqa: F401
