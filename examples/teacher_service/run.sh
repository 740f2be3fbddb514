#!/usr/bin/env bash
# A teacher in a job of its own on two CPU cores: the teacher service on one core works ahead of the student on the other.
#
#   bash examples/teacher_service/run.sh
#
# The models and the text are those of the quickstart (examples/quickstart/run.sh): SmolLM2-135M-Instruct as the teacher,
# every other one of its layers as the student, Python's documentation. Needs Python >= 3.12, 6 GB of memory and 8 GB of
# disk, most of it for the environment in .venv, and 4 to 5 minutes after the installation. All output goes to
# runs/teacher_service. Prepared models and texts are kept; the training starts again.
#
# TEACHER and STUDENT (Hugging Face folders) and DATA (a folder with train_text_document and valid_text_document of
# mkd preprocess) may name other ones. MKD_SKIP_SETUP=1 takes the commands mkd and python on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

RUNS="${RUNS:-runs/teacher_service}"
STEPS="${STEPS:-20}"
SEQ_LENGTH="${SEQ_LENGTH:-128}"

step() { printf '\n\033[1m[%3d s] %s\033[0m\n' "$SECONDS" "$*"; }

if [[ -z "${MKD_SKIP_SETUP:-}" ]]; then
    bash tools/setup_env.sh
    export PATH="$PWD/.venv/bin:$PATH"
fi
export MKD_DEVICE=cpu                   # even with a GPU: this run is designed for two CPU processes
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore

if [[ -z "${TEACHER:-}" ]]; then
    TEACHER=$RUNS/teacher
    if [[ ! -d $TEACHER ]]; then
        step "Teacher: SmolLM2-135M-Instruct to $TEACHER"
        python examples/quickstart/make_teacher.py --out "$TEACHER"
    fi
fi
if [[ -z "${DATA:-}" ]]; then
    DATA=$RUNS/data
    if [[ ! -f $DATA/valid_text_document.idx ]]; then
        step "Text: Python's own documentation, tokenized"
        python examples/quickstart/make_text.py --out "$DATA"
        for part in train valid; do
            mkd preprocess --input "$DATA/$part.jsonl" --output-prefix "$DATA/$part" --tokenizer-model "$TEACHER"
        done
    fi
fi
if [[ -z "${STUDENT:-}" ]]; then
    STUDENT=$RUNS/student
    if [[ ! -d $STUDENT ]]; then
        step "Student: every other layer of the teacher, to $STUDENT"
        mkd prune depth --hf "$TEACHER" --out "$STUDENT" --every 2
    fi
fi

# ---------------------------------------------------------------------------------------------------------------------
# Training. The flags are those of a training with the teacher on the student's ranks; mkd launch starts the service and
# the student, each with its part of them. Lines of the service begin with "teacher |".

step "Teacher service and student, $STEPS steps"
OUT=$RUNS/student-served
rm -rf "${OUT:?}"
mkd launch --teacher-gpus 1 --student-gpus 1 -- \
    --kd-teacher-hf "$TEACHER" --kd-student-hf "$STUDENT" --kd-ratio 0.9 \
    --train-data-path "$DATA/train_text_document" --valid-data-path "$DATA/valid_text_document" \
    --seq-length "$SEQ_LENGTH" --micro-batch-size 1 --global-batch-size 4 --kd-teacher-ahead 2 \
    --train-iters "$STEPS" --lr 1e-3 --min-lr 5e-5 --lr-decay-style cosine --lr-warmup-iters 3 --clip-grad 1.0 \
    --weight-decay 0.01 --adam-beta2 0.95 --save "$OUT" --save-interval "$STEPS" --log-interval 2 \
    --eval-interval "$STEPS" --eval-iters 2

step "Results"
python examples/teacher_service/overlap.py "$OUT/metrics.jsonl"
step "Done: checkpoint $OUT"
