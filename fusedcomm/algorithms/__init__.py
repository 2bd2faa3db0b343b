"""How an op runs. `chunked` and `fused` offer the same functions; `reference` is the third algorithm, `unfused`."""
