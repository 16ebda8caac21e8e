#!/usr/bin/env bash
# StaleFlow under Slurm: a Ray cluster over the nodes of one job, which ends with it.
# sbatch slurm.sh run.yaml
#SBATCH --job-name=staleflow
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
set -euo pipefail

config=${1:?the configuration of the run}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # other jobs may have the same node

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_AUTH_TOKEN

# Starts Ray on every node, runs the command on the first, and stops Ray. The run directory is on the shared disk.
exec srun ray symmetric-run --address "$head:$port" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    staleflow train "$config" runtime=ray ray.address="$head:$port" runs="$SLURM_SUBMIT_DIR/runs" --plain
