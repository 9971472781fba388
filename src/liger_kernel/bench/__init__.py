"""Benchmarks: `liger-kernel bench`. The rows stand in benchmarks/rows."""
