"""What works inside other engines, which go on running their tasks: Snakemake's storage plugin, Parsl's staging (docs/tutorials)."""
