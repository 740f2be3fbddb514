#!/usr/bin/env bash
# A teacher with a different tokenizer: distills SmolLM2-135M-Instruct (49,152 tokens) into an untrained student with its
# own tokenizer of 8,192 tokens. Trains the same steps on the same text with every cross-tokenizer loss, and on the text
# alone.
#
#   bash examples/quickstart/run.sh           # creates the teacher
#   bash examples/cross_tokenizer/run.sh
#
# LOSSES, SEEDS, STEPS, ROWS and LENGTH change the amount of work; JOBS of them run at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -d .venv ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi  # the quickstart's environment

TEACHER=${TEACHER:-runs/quickstart/teacher}
RUNS=${RUNS:-runs/cross_tokenizer}
STEPS=${STEPS:-150}
ROWS=${ROWS:-8}                      # samples per step
LENGTH=${LENGTH:-128}                # tokens per sample
KD_RATIO=${KD_RATIO:-0.5}
LOSSES=${LOSSES-"partition_kl p_kl gold"}
JOBS=${JOBS:-1}
SEEDS=${SEEDS:-1}                    # orders of the samples
export RUNS STEPS TEACHER KD_RATIO OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore

[[ -f $TEACHER/config.json ]] || { echo "run.sh: no model in $TEACHER: run bash examples/quickstart/run.sh first" >&2; exit 1; }

if [[ ! -f $RUNS/valid_text_document.idx ]]; then
    python examples/cross_tokenizer/make_student.py --out "$RUNS"
    for part in train valid; do
        python tools/preprocess.py --input "$RUNS/$part.jsonl" --output-prefix "$RUNS/$part" --tokenizer-model "$RUNS/student"
    done
fi

export FLAGS="--kd-teacher-hf $TEACHER --kd-student-hf $RUNS/student --kd-packing best_fit
    --train-data-path $RUNS/train_text_document --valid-data-path $RUNS/valid_text_document
    --seq-length $LENGTH --micro-batch-size ${MICRO_BATCH:-$ROWS} --global-batch-size $ROWS --train-iters $STEPS
    --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters $((STEPS / 20 + 1)) --weight-decay 0.01
    --adam-beta2 0.95 --clip-grad 1.0 --eval-interval $((STEPS / 5 + 1)) --eval-iters ${EVAL_ITERS:-12} --log-interval 10
    ${PRECISION:-}"

train() {  # train LOSS SEED, where LOSS may be ce
    local out=$RUNS/$1/$2 kd=(--kd-ratio "$KD_RATIO" --kd-xtoken-loss "$1")
    if [[ $1 == ce ]]; then kd=(--kd-ratio 0 --kd-xtoken-loss); fi  # the same rows
    rm -rf "$out"; mkdir -p "$out"
    # shellcheck disable=SC2086  # FLAGS is a list
    if ! torchrun --standalone --nproc-per-node 1 pretrain_kd.py $FLAGS "${kd[@]}" --seed "$2" \
        --kd-metrics-file "$out/metrics.jsonl" > "$out.txt" 2>&1; then
        tail -n 20 "$out.txt" >&2
        return 1
    fi
    echo "$1, seed $2: done after $SECONDS s"
}
export -f train

for seed in $SEEDS; do
    for loss in ce $LOSSES; do echo "$loss $seed"; done
done | xargs -P "$JOBS" -L 1 bash -c 'set -euo pipefail; train "$@"' _

# shellcheck disable=SC2086
python examples/cross_tokenizer/draw.py "$RUNS" --losses ce $LOSSES --seeds $SEEDS --out "$RUNS/quality.png"
