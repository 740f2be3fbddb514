# shellcheck shell=bash
# What the training scripts of this folder share. They source it; it is not run by itself.
#
#   need NAME MEANING           ends with one line unless the variable is set
#   need_path NAME MEANING      ... and names a file or folder that exists
#   divide NUMBER BY MEANING    prints the quotient; ends with one line if there is a rest
#   launch FLAG...              pretrain_kd.py with these flags and DEVICE_FLAGS, as this node's share of the ranks
#
# It sets NNODES and GPUS_PER_NODE, and DEVICE_FLAGS: the flags that are for GPUs only.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

need() {
    [[ -n "${!1:-}" ]] || fail "$1 is not set: $2"
}

need_path() {
    need "$@"
    [[ -e "${!1}" ]] || fail "$1 is ${!1}, which does not exist: $2"
}

divide() {
    (($1 % $2 == 0)) || fail "$1 is not a multiple of $2: $3"
    echo $(($1 / $2))
}

# ---------------------------------------------------------------------------------------------------------------------
# GPU or CPU. Everything that differs between a cluster and a trial on two CPU cores is here.

: "${NNODES:=1}"
if [[ "${MKD_DEVICE:-cuda}" == cpu ]]; then
    # A trial: two processes, fp32 over gloo, few short steps. What is set already stays as it is.
    : "${GPUS_PER_NODE:=2}" "${SEQ_LENGTH:=128}" "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=8}"
    : "${TRAIN_ITERS:=10}" "${WARMUP_ITERS:=1}" "${SAVE_INTERVAL:=5}" "${EVAL_INTERVAL:=5}" "${EVAL_ITERS:=2}"
    : "${LOG_INTERVAL:=1}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # one thread a process, or they wait for one another
    DEVICE_FLAGS=()
else
    : "${GPUS_PER_NODE:=8}"
    # Kernels start in the order in which they were queued, so that communication overlaps with what it should; Megatron
    # insists on it under tensor parallelism.
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    DEVICE_FLAGS=(
        --bf16                           # weights and activations; gradients add up and Adam counts in fp32
        --overlap-grad-reduce            # gradients travel while the backward pass goes on,
        --overlap-param-gather           # new weights while the next forward pass does
        --distributed-timeout-minutes 30 # to read a large teacher the first time may take longer than Megatron's 10
    )
fi

# ---------------------------------------------------------------------------------------------------------------------
# Ranks. The same script starts in three ways:
#
#   one node        bash SCRIPT
#   several nodes   NNODES=4 NODE_RANK=0 MASTER_ADDR=HOST_OF_NODE_0 bash SCRIPT, on each node with its own NODE_RANK
#   SLURM           sbatch examples/slurm/train.sbatch bash SCRIPT: each rank runs it, and rank.sh tells it which it is
#
# exec: the process that gets a signal is then the rank or torchrun itself, with no shell before it.

launch() {
    local command=("$ROOT/pretrain_kd.py" "${DEVICE_FLAGS[@]}" "$@")
    if [[ -n "${RANK:-}" ]]; then
        exec python "${command[@]}"
    fi
    local rendezvous=(--standalone)
    if ((NNODES > 1)); then
        need NODE_RANK "the number of this node, from 0 to $((NNODES - 1))"
        need MASTER_ADDR "the host name of node 0"
        rendezvous=(
            --nnodes "$NNODES" --node-rank "$NODE_RANK"
            --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
        )
    fi
    exec torchrun "${rendezvous[@]}" --nproc-per-node "$GPUS_PER_NODE" "${command[@]}"
}
