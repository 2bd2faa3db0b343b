"""How an op runs. `chunked`, `fused` and `pipelined` offer the same functions; `reference` is `unfused`."""
