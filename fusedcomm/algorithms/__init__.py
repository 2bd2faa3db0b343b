"""How an op runs. Each module offers the same verbs; reference.py is the third algorithm, `unfused`."""
