"""Collectives over several dims of one mesh become one."""
