"""The parts that benchmarks share: child processes, loads, figures, reports."""
