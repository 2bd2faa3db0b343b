"""Schedules as GPUs get them, without one: checked for races and blocked waits, and timed by a simulator."""
