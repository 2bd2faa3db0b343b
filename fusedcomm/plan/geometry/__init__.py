"""Shapes, exchanges and index sets: which elements go where. No communication, no memory."""
