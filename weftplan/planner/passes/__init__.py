"""Passes: functions from graph facts to graph facts, each with its needs and what it gives."""
