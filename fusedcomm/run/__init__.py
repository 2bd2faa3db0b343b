"""The execution of calls: the steps of a schedule, in Python or natively, or `unfused` at once."""
