"""How long anything takes: the model that the planner compares algorithms by, links, and measured constants."""
