"""Speed of each op next to its baseline and its roof: ``python -m benchmarks.bench_<op>``."""
