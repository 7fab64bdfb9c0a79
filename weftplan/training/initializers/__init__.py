"""Initializers: ``mx.init``."""
