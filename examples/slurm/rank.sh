#!/usr/bin/env bash
# One rank of a job: srun starts this script for each task, in a container or not. It sets torchrun's variables from
# SLURM's and then executes the command.
#
#   srun --ntasks-per-node 8 bash examples/slurm/rank.sh python pretrain_kd.py FLAG...
set -euo pipefail

: "${SLURM_PROCID:?is not set: srun starts this script}"
: "${MASTER_ADDR:?is not set: the host name of the first node}" "${MASTER_PORT:?is not set: a free port there}"

export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
export NNODES="$SLURM_STEP_NUM_NODES" NODE_RANK="$SLURM_NODEID"
export GPUS_PER_NODE="$((WORLD_SIZE / NNODES))"

# exec: SLURM sends signals to the process that it started, which must be the training itself.
exec "$@"
