"""Benchmarks of Millpond's own parts, between real processes: `python -m scripts.bench NAME`, or `scripts/bench/run
NAME`.

Each module measures one thing and returns tables; only __main__ prints them and writes docs/benchmarks.md. CPU time is
what the kernel charged to a process, never a difference of wall clocks, because wall time on a shared machine says
little.
"""
