"""The suite of measurements. `bench/run` is its command.

command   words → cells → runs, with the expected time and the progress
items     the measurements: each gives cells (a workload, its parameters, the compared variants)
testbed   the stores: makes, calibrates, cools and removes them
variants  the ways to run a workload: straight on the store, by hand, over an overlay, under Surgetank
measure   one run: memory cgroup, clock, processor time, bytes, and a check that the store has everything
records   the measured values, as files of one schema
statistics, report   medians and intervals; tables and plots
expect    the five figures of docs/performance.md
"""
