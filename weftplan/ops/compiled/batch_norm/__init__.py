"""Compiled batch normalisation."""
