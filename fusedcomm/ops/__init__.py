"""One file per op: checks, schema, algorithms, fake, autograd."""
