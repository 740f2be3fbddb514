#!/usr/bin/env bash
# Llama-3.1-8B teaches Llama-3.2-1B on plain text.
#
#   TEACHER=Llama-3.1-8B STUDENT=Llama-3.2-1B DATA=data/text_document SAVE=runs/1b bash examples/llama/8b_to_1b.sh
#
# on one node of 8 GPUs with 80 GB. The same command once more continues the run. How to start several nodes is in
# examples/launch.sh, SLURM in docs/slurm.md. Every value below can be given as an environment variable; arguments are
# further flags: with --kd-dry-run everything is checked and the plan printed, and no GPU is needed.
#
# A trial on two CPU cores, with small models and data of the same kind:
#
#   NNODES=1 MKD_DEVICE=cpu TEACHER=... STUDENT=... DATA=... SAVE=... bash examples/llama/8b_to_1b.sh
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

need_path TEACHER "the teacher's Hugging Face folder (config.json, safetensors, tokenizer)"
need_path STUDENT "the student's Hugging Face folder: its size and its first weights"
need DATA "prefix of the .bin and .idx file that tools/preprocess.py makes (docs/data.md)"
need SAVE "the folder for checkpoints and metrics, made if it is not there"

# ---------------------------------------------------------------------------------------------------------------------
# Layout. Nothing is cut: 16 GB of teacher, and of the student (1.24 billion parameters) 2.5 GB of weights, 5 GB of
# gradients and 15 GB of optimizer state spread over the data-parallel ranks, fit one GPU, so each has a replica and
# nodes only add more. Tensor parallelism would cost two collectives a layer and save nothing that is short.

TP="${TP:-1}"
PP="${PP:-1}"
CP="${CP:-1}" # 2 or more for rows much longer than 8192 tokens
DP="$(divide $((NNODES * GPUS_PER_NODE)) $((TP * PP * CP)) "NNODES x GPUS_PER_NODE ranks by TP x PP x CP")"

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --use-distributed-optimizer # the optimizer's state is cut over the DP replicas
)
if ((TP > 1)); then
    LAYOUT+=(--sequence-parallel) # norms and residuals too, at no further communication
fi

# ---------------------------------------------------------------------------------------------------------------------
# Batch. 256 rows of 4096 tokens are a million tokens a step, whatever the number of nodes: more nodes make the same run
# faster. What a GPU does at once is 2 rows; 8192 tokens keep it busy, and peaked at 32 GiB without optimizer
# (docs/benchmarks.md).

SEQ_LENGTH="${SEQ_LENGTH:-4096}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-2}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-256}"
divide "$GLOBAL_BATCH_SIZE" $((DP * MICRO_BATCH_SIZE)) "GLOBAL_BATCH_SIZE by DP x MICRO_BATCH_SIZE" >/dev/null

BATCH=(
    --data-path "$DATA"
    --split "99,1,0" # train, validation, test
    --seq-length "$SEQ_LENGTH"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
)

# ---------------------------------------------------------------------------------------------------------------------
# Distillation and optimizer. The student is not a random one: a moderate rate, which falls to a tenth. Ten thousand
# steps are ten billion tokens.

KD_RATIO="${KD_RATIO:-0.9}" # loss = 0.1 cross-entropy + 0.9 KL(teacher || student): text keeps a say
TRAIN_ITERS="${TRAIN_ITERS:-10000}"

TRAINING=(
    --kd-teacher-hf "$TEACHER"
    --kd-student-hf "$STUDENT"
    --kd-ratio "$KD_RATIO"
    --train-iters "$TRAIN_ITERS"
    --lr "${LR:-1e-4}"
    --min-lr "${MIN_LR:-1e-5}"
    --lr-decay-style cosine
    --lr-warmup-iters "${WARMUP_ITERS:-100}" # until Adam's averages mean something
    --adam-beta2 0.95                        # batches of a million tokens are quiet: a short memory of their squares
    --weight-decay 0.1
    --clip-grad 1.0
)

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and evaluation. SIGTERM and SIGUSR1 save as well, so the interval is what a crash may cost. --load is
# --save: the job continues where it was. Integrity of a checkpoint is checked when it is read.

KEEPING=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval "${SAVE_INTERVAL:-500}"
    --eval-interval "${EVAL_INTERVAL:-500}"
    --eval-iters "${EVAL_ITERS:-20}" # 20 million tokens: a minute or two
    --log-interval "${LOG_INTERVAL:-10}"
)

launch "${TRAINING[@]}" "${LAYOUT[@]}" "${BATCH[@]}" "${KEEPING[@]}" "$@"
