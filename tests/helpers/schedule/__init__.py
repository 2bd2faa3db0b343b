"""What calls enqueue on GPUs, recorded without one, checked for races and blocked waits, and timed by a simulator."""
