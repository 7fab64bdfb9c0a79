"""The functions and operators of ``mx.sym``."""
