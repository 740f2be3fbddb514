#!/usr/bin/env bash
# Distills Llama-3.1-8B into Llama-3.2-1B on plain text.
#
#   TEACHER=Llama-3.1-8B STUDENT=Llama-3.2-1B DATA=data/text_document SAVE=runs/1b bash examples/llama/8b_to_1b.sh
#
# on one node of 8 GPUs with 80 GB. The same command resumes the run. For several nodes see examples/launch.sh, for SLURM
# docs/slurm.md. Every value below can be set by an environment variable; arguments are passed on as further flags:
# --kd-dry-run checks everything and prints the plan, and needs no GPU.
#
# A trial on two CPU cores, with small models and data of the same kind:
#
#   NNODES=1 MKD_DEVICE=cpu TEACHER=... STUDENT=... DATA=... SAVE=... bash examples/llama/8b_to_1b.sh
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

need_path TEACHER "the teacher's Hugging Face folder (config.json, safetensors, tokenizer)"
need_path STUDENT "the student's Hugging Face folder: its size and its initial weights"
need DATA "prefix of the .bin and .idx files that tools/preprocess.py writes (docs/data.md)"
need SAVE "the folder for checkpoints and metrics, created if it does not exist"

# ---------------------------------------------------------------------------------------------------------------------
# Layout. No model parallelism: 16 GB of teacher weights, and for the student (1.24 billion parameters) 2.5 GB of weights,
# 5 GB of gradients and 15 GB of optimizer state sharded over the data-parallel ranks, fit on one GPU. Each GPU has a
# replica, and more nodes add replicas. Tensor parallelism would cost two collectives per layer and save memory that is
# not needed.

TP="${TP:-1}"
PP="${PP:-1}"
CP="${CP:-1}" # 2 or more for rows much longer than 8192 tokens
DP="$(divide $((NNODES * GPUS_PER_NODE)) $((TP * PP * CP)) "NNODES x GPUS_PER_NODE ranks by TP x PP x CP")"

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --use-distributed-optimizer # shards the optimizer state over the DP replicas
)
if ((TP > 1)); then
    LAYOUT+=(--sequence-parallel) # shards norms and residuals too, without more communication
fi

# ---------------------------------------------------------------------------------------------------------------------
# Batch. 256 rows of 4096 tokens are a million tokens per step, for any number of nodes: more nodes make the same run
# faster. A microbatch is 2 rows: 8192 tokens keep a GPU busy, with a peak of 32 GiB without the optimizer
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
# Distillation and optimizer. The student is pretrained, so the learning rate is moderate and decays to a tenth. Ten
# thousand steps are ten billion tokens.

KD_RATIO="${KD_RATIO:-0.9}" # loss = 0.1 cross-entropy + 0.9 KL(teacher || student): the text still counts
TRAIN_ITERS="${TRAIN_ITERS:-10000}"

TRAINING=(
    --kd-teacher-hf "$TEACHER"
    --kd-student-hf "$STUDENT"
    --kd-ratio "$KD_RATIO"
    --train-iters "$TRAIN_ITERS"
    --lr "${LR:-1e-4}"
    --min-lr "${MIN_LR:-1e-5}"
    --lr-decay-style cosine
    --lr-warmup-iters "${WARMUP_ITERS:-100}" # until Adam's averages are meaningful
    --adam-beta2 0.95                        # batches of a million tokens have little noise: average fewer squares
    --weight-decay 0.1
    --clip-grad 1.0
)

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and evaluation. SIGTERM and SIGUSR1 also save, so the interval limits what a crash can lose. --load is
# --save: the same command resumes. The integrity of a checkpoint is checked when it is read.

KEEPING=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval "${SAVE_INTERVAL:-500}"
    --eval-interval "${EVAL_INTERVAL:-500}"
    --eval-iters "${EVAL_ITERS:-20}" # 20 million tokens: a minute or two
    --log-interval "${LOG_INTERVAL:-10}"
)

launch "${TRAINING[@]}" "${LAYOUT[@]}" "${BATCH[@]}" "${KEEPING[@]}" "$@"
