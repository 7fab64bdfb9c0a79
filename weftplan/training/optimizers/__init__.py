"""Optimizers, learning-rate schedules, and fused steps over many weights."""
