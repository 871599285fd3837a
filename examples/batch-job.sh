#!/bin/bash
#SBATCH --job-name=terrain
#SBATCH --time=02:00:00
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:TERM@300
# A job on one node. The project lies on the shared file system; the job's own directories ($TMPDIR, $SLURM_TMPDIR) and
# /dev/shm are found as fast tiers. Five minutes before the time limit Slurm sends TERM: `exec` lets it reach
# Surgetank, which passes it to the command, drains at once, and reports what is left.
#
# The job fails (exit code 3) if anything that should be in the store is not: Slurm's dependencies (afterok) then wait.
cd "$SLURM_SUBMIT_DIR" || exit 1
exec surgetank run -- make -j "$SLURM_CPUS_PER_TASK"
