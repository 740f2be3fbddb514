# shellcheck shell=bash
# Functions shared by the training scripts, which source this file; it is not run by itself.
#
#   need NAME MEANING           exits with a one-line error unless the variable is set
#   need_path NAME MEANING      ... and is the path of an existing file or folder
#   divide NUMBER BY MEANING    prints the quotient; exits with a one-line error if there is a remainder
#   launch FLAG...              runs pretrain_kd.py with these flags and DEVICE_FLAGS on the ranks of this node
#
# Sets NNODES, GPUS_PER_NODE, and DEVICE_FLAGS, the flags for GPUs only.

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
# GPU or CPU. Every difference between a cluster and a trial on two CPU cores is here.

: "${NNODES:=1}"
if [[ "${MKD_DEVICE:-cuda}" == cpu ]]; then
    # A trial: two processes, fp32 over gloo, few short steps. Variables that are set already keep their values.
    : "${GPUS_PER_NODE:=2}" "${SEQ_LENGTH:=128}" "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=8}"
    : "${TRAIN_ITERS:=10}" "${WARMUP_ITERS:=1}" "${SAVE_INTERVAL:=5}" "${EVAL_INTERVAL:=5}" "${EVAL_ITERS:=2}"
    : "${LOG_INTERVAL:=1}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # one thread per process, or they wait for one another
    DEVICE_FLAGS=()
else
    : "${GPUS_PER_NODE:=8}"
    # Kernels start in the order in which they are queued, so that communication overlaps with computation as intended.
    # Megatron requires this under tensor parallelism.
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    DEVICE_FLAGS=(
        --bf16                           # weights and activations; gradients are accumulated and Adam runs in fp32
        --overlap-grad-reduce            # reduce gradients during the backward pass
        --overlap-param-gather           # gather new weights during the next forward pass
        --distributed-timeout-minutes 30 # reading a large teacher for the first time may take longer than Megatron's 10
    )
fi

# ---------------------------------------------------------------------------------------------------------------------
# Ranks. The same script can be started in three ways:
#
#   one node        bash SCRIPT
#   several nodes   NNODES=4 NODE_RANK=0 MASTER_ADDR=HOST_OF_NODE_0 bash SCRIPT, on each node with its own NODE_RANK
#   SLURM           sbatch examples/slurm/train.sbatch bash SCRIPT: every rank runs it, with its rank set by rank.sh
#
# exec: signals then reach the rank or torchrun itself, without a shell in between.

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
