"""Operators of object detectors: boxes, suppression, anchors, regions. Each module has one family."""
