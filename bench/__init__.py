"""Speed of each op next to its baseline and its roof: ``python -m bench.bench_<op>``."""
