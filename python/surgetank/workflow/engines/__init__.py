"""Plugins inside other engines, which continue to run their own tasks: Snakemake's storage plugin, Parsl's staging.
See docs/tutorials.
"""
