"""DTensors redistributed with the fewest, largest collectives: `redistribute` and `redistribute_plan`.

One call, file by file: `api` checks and calls the op; `dtensor` is the op, its gradient and DTensor's side of it;
`placements` makes a `sharding` of what DTensor has; `search` looks for the `steps` from one to the other, by what they
send (`traffic`) and take (`step_time`), and no worse than one mesh dim at a time (`by_dim`); `mesh_groups` has the
process groups of several mesh dims at once; `execute` packs, sends and unpacks: equal blocks (`even`), boxes of any
size (`uneven`), and what is to be added up on arrival (`reductions`).
"""
