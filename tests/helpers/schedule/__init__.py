"""What schedules enqueue on GPUs, without one: checked for races and blocked waits, and timed by a simulator."""
