"""The execution of calls: by plans, or as `unfused` and `pipelined` programs."""
