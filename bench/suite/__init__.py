"""The suite of measurements. `bench/run` is its entrance.

command   words → cells → runs, with what it takes beforehand and how far it is
items     what is measured: each gives cells (a workload, its parameters, the variants that are compared)
testbed   the stores: made, calibrated, cold, taken apart
variants  how a workload is run: straight on the store, by hand, over an overlay, under Surgetank
measure   one run: memory cgroup, clock, processor time, bytes, and whether all of it is really there
records   what was measured, as files of one schema
statistics, report   medians and intervals; tables and plots
expect    the five figures of docs/performance.md
"""
