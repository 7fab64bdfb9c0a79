"""Optimizers, learning-rate schedules, and one step on many weights."""
