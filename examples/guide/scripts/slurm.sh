#!/usr/bin/env bash
#SBATCH --job-name=guide
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --output=guide-%j.log
# sbatch --gpus-per-node=8 --export=ALL,RANKS=8 scripts/slurm.sh fsdp [arguments of train.py], from the folder examples/guide
# Settings: those of many_nodes.sh, except that Slurm provides NODES, HEAD and RUN_ID; PORT (by default 29500)
set -euo pipefail

scripts=${SCRIPTS:-${SLURM_SUBMIT_DIR:?to be started by sbatch}/scripts}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export NODES=$SLURM_NNODES HEAD=${hosts[0]}:${PORT:-29500} RUN_ID=$SLURM_JOB_ID
exec srun --kill-on-bad-exit=1 bash "$scripts/many_nodes.sh" "$@"
