"""DTensors redistributed with the fewest, largest collectives: `redistribute` and `redistribute_plan`.

A call goes through these files. `api` checks its arguments and calls the op; `dtensor` has the op, its gradient and its
handler for DTensors; `placements` makes a `sharding` from DTensor's placements. `search` looks for the `steps` from one
sharding to the other, by `step_time`, and finds none worse than one mesh dim at a time (`by_dim`).
`mesh_groups` has the process groups of several mesh dims at once. `execute` packs, sends and unpacks: equal
blocks, boxes of any size and parts to be added up on arrival (`uneven`).
"""
