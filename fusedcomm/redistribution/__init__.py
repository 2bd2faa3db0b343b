"""DTensors redistributed with the fewest, largest collectives: `redistribute` and `redistribute_plan`.

One call, file by file: `api` checks and calls the op; `dtensor` is the op, its gradient and DTensor's side of it;
`placements` makes a `sharding` of what DTensor has; `planner` searches the `steps` from one to the other, by what they
send (`traffic`, `cost`) and no worse than one mesh dim at a time (`by_dim`); `groups` has the process groups of several
mesh dims at once; `execute` packs, sends and unpacks: equal blocks (`regular`), boxes of any size (`pieces`), and what
is to be added up on arrival (`reductions`).
"""
