"""Sums over the devices of one process: copies and additions that follow the links between them.

``ways.py`` has the ways in which a sum can be made (``trees.py`` finds trees and rings on links), ``program.py`` writes
a way down as steps and knows how long they take, ``choice.py`` takes the fastest, ``runner.py`` runs it.
"""
