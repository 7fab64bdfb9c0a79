"""Sums over the devices of one process: copies and additions that follow the links between them.

``ways.py`` has the routes of a sum (``trees.py`` finds trees and rings on links), ``program.py`` turns a route into
steps and models their time, ``choice.py`` chooses the fastest, ``runner.py`` runs it.
"""
