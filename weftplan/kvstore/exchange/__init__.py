"""Sums over the devices of one process, by copies over the links between devices and additions on them.

``ways.py`` defines candidate routes of a sum, with trees and rings from ``trees.py``. ``program.py`` turns a route into
steps and models their time, ``choice.py`` chooses the fastest route, and ``runner.py`` runs its program.
``between.py`` combines these parts into a way of summing for the store ``device``.
"""
