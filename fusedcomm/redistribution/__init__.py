"""DTensors redistributed with the fewest, largest collectives: `redistribute` and `redistribute_plan`.

One call, file by file: `api` checks and calls the op; `operator` is the op, its gradient and DTensor's side of it;
`planner` searches the steps from one `sharding` to the other; `steps` says what one collective can do and sends;
`execute` packs, sends and unpacks; `groups` has the process groups of several mesh dims at once.
"""
