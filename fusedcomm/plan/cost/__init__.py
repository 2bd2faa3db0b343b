"""How long calls and collectives take: the model that the planner uses, links, and measured constants."""
