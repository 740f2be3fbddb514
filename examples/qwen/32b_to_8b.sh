#!/usr/bin/env bash
# Distills Qwen3-32B into Qwen3-8B on conversations in packed rows.
#
#   TEACHER=Qwen3-32B STUDENT=Qwen3-8B DATA=chats.jsonl SAVE=runs/8b bash examples/qwen/32b_to_8b.sh
#
# on one node of 8 GPUs with 80 GB. The same command resumes the run. For several nodes see examples/launch.sh, for SLURM
# docs/slurm.md. Every value below can be set by an environment variable; arguments are passed on as further flags:
# --kd-dry-run checks everything and prints the plan, and needs no GPU.
#
# A trial on two CPU cores, with small models and conversations of your own:
#
#   NNODES=1 MKD_DEVICE=cpu TEACHER=... STUDENT=... DATA=... SAVE=... bash examples/qwen/32b_to_8b.sh
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

need_path TEACHER "the teacher's Hugging Face folder (config.json, safetensors, tokenizer)"
need_path STUDENT "the student's Hugging Face folder: its size, its initial weights and the chat template"
need_path DATA "a .jsonl file with one conversation per line (docs/data.md)"
need SAVE "the folder for checkpoints and metrics, created if it does not exist"

# ---------------------------------------------------------------------------------------------------------------------
# Layout. 66 GB of teacher weights do not fit next to a student: both models are sharded over 4 GPUs of a node, where the
# links are fast. Of the 80 GB of a GPU the teacher takes 16; the student (2.05 billion parameters per GPU) takes 4 for
# weights, 8 for gradients, and 24 for the optimizer, divided by the DP replicas: two per node, more with more nodes.

TP="${TP:-$((GPUS_PER_NODE < 4 ? GPUS_PER_NODE : 4))}" # divides the 8 key-value heads of both models
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
# Batch. Rows are filled with whole conversations, which do not attend to each other; without packing most of a row would
# be padding. CE and KD are taken on assistant messages (--kd-mask labels, the default). 64 rows are half a million
# tokens, for any number of nodes: conversations are few, and smaller batches allow more steps.

SEQ_LENGTH="${SEQ_LENGTH:-8192}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}" # a row of 8192 tokens keeps a GPU busy
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
divide "$GLOBAL_BATCH_SIZE" $((DP * MICRO_BATCH_SIZE)) "GLOBAL_BATCH_SIZE by DP x MICRO_BATCH_SIZE" >/dev/null

BATCH=(
    --data-path "$DATA"
    --split "98,2,0" # train, validation, test
    --kd-packing best_fit
    --seq-length "$SEQ_LENGTH"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
)

# ---------------------------------------------------------------------------------------------------------------------
# Distillation and optimizer. The student is a chat model already: the learning rate is that of fine-tuning.

KD_RATIO="${KD_RATIO:-0.9}" # loss = 0.1 cross-entropy + 0.9 KL(teacher || student): the answers in the data still count
TRAIN_ITERS="${TRAIN_ITERS:-2000}" # a billion tokens of rows

TRAINING=(
    --kd-teacher-hf "$TEACHER"
    --kd-student-hf "$STUDENT"
    --kd-ratio "$KD_RATIO"
    --train-iters "$TRAIN_ITERS"
    --lr "${LR:-1e-5}"
    --min-lr "${MIN_LR:-1e-6}"
    --lr-decay-style cosine
    --lr-warmup-iters "${WARMUP_ITERS:-50}" # until Adam's averages are meaningful
    --adam-beta2 0.95
    --weight-decay 0.0 # short fine-tuning: keep the pretrained weights
    --clip-grad 1.0
)

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and evaluation. SIGTERM and SIGUSR1 also save, so the interval limits what a crash can lose. A checkpoint
# takes 115 GB. --load is --save: the same command resumes.

KEEPING=(
    --save "$SAVE"
    --load "$SAVE"
    --save-interval "${SAVE_INTERVAL:-200}"
    --eval-interval "${EVAL_INTERVAL:-200}"
    --eval-iters "${EVAL_ITERS:-10}"
    --log-interval "${LOG_INTERVAL:-10}"
)

launch "${TRAINING[@]}" "${LAYOUT[@]}" "${BATCH[@]}" "${KEEPING[@]}" "$@"
