"""Modules: a symbol with its parameters, trained on one or several contexts."""
