"""Evaluation metrics: ``mx.metric``."""
