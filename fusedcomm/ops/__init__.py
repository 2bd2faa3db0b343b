"""One file per op: checks, schema, fake, autograd, dispatch."""
