#!/usr/bin/env bash
# The cost of a sparse teacher: trains the quickstart's student on SmolLM2's full distribution, on its K most probable
# tokens, and on tokens sampled from it, with the same steps on the same text. Prints a table of held-out quality and
# draws it.
#
#   bash examples/quickstart/run.sh           # creates teacher and student
#   bash examples/sparse_teachers/run.sh
#
# Fourteen training runs and four caches: minutes on a GPU, with JOBS of them at a time; hours on two CPU cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -d .venv ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi  # the quickstart's environment

TEACHER=${TEACHER:-runs/quickstart/teacher}
STUDENT=${STUDENT:-runs/quickstart/student}
RUNS=${RUNS:-runs/sparse_teachers}
STEPS=${STEPS:-200}                  # of 16 x 256 tokens
JOBS=${JOBS:-1}
KS=${KS-"1 4 16 64 256"}
DRAWS=${DRAWS-"1 4 16 64"}
export RUNS STEPS TEACHER STUDENT OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore

[[ -f $TEACHER/config.json && -f $STUDENT/config.json ]] || {
    echo "run.sh: no models in $TEACHER and $STUDENT: run bash examples/quickstart/run.sh first" >&2; exit 1; }

# Every sixth page is held out: 13 of 79.
if [[ ! -f $RUNS/data/valid_text_document.idx ]]; then
    python examples/quickstart/make_text.py --out "$RUNS/data" --held-out-every 6
    for part in train valid; do
        python tools/preprocess.py --input "$RUNS/data/$part.jsonl" --output-prefix "$RUNS/data/$part" --tokenizer-model "$TEACHER"
    done
fi

# Flags common to all runs. The loss is the divergence alone (R = 1): cross-entropy would make up for what a sparse
# teacher leaves out.
export FLAGS="--kd-student-hf $STUDENT
    --train-data-path $RUNS/data/train_text_document --valid-data-path $RUNS/data/valid_text_document
    --seq-length 256 --micro-batch-size 16 --global-batch-size 16 --train-iters $STEPS --seed 1
    --lr 1e-3 --min-lr 5e-5 --lr-decay-style cosine --lr-warmup-iters $((STEPS / 20)) --weight-decay 0.01 --adam-beta2 0.95
    --clip-grad 1.0 --eval-interval $STEPS --eval-iters ${EVAL_ITERS:-1} --log-interval 50 ${PRECISION:-}"

cache() {  # cache DRAWS
    local folder=$RUNS/cache_sampled_$1
    # shellcheck disable=SC2086  # FLAGS is a list
    torchrun --standalone --nproc-per-node 1 tools/cache_teacher.py write --out "$folder" --sample "$1" \
        -- --kd-teacher-hf "$TEACHER" $FLAGS > "$RUNS/cache_sampled_$1.txt" 2>&1
}

train() {  # train NAME, such as full, top_16, renormalize_16, sampled_16 or ce
    local name=$1 out=$RUNS/$1 teacher=(--kd-teacher-hf "$TEACHER" --kd-ratio 1)
    case $name in
        full) ;;
        ce) teacher=(--kd-teacher-hf "$TEACHER" --kd-ratio 0) ;;
        top_*) teacher+=(--kd-top-k "${name#*_}") ;;
        renormalize_*) teacher+=(--kd-top-k "${name#*_}" --kd-top-k-tail renormalize) ;;
        sampled_*) cache "${name#*_}"; teacher=(--kd-teacher-cache "$RUNS/cache_$name" --kd-ratio 1) ;;
    esac
    rm -rf "$out"; mkdir -p "$out"
    # shellcheck disable=SC2086
    if ! torchrun --standalone --nproc-per-node 1 pretrain_kd.py "${teacher[@]}" $FLAGS \
        --kd-metrics-file "$out/metrics.jsonl" > "$out.txt" 2>&1; then
        tail -n 20 "$out.txt" >&2
        return 1
    fi
    echo "$name: done after $SECONDS s"
}
export -f cache train

names=()
for n in $DRAWS; do names+=("sampled_$n"); done  # these take longest
names+=(full ce)
for k in $KS; do
    names+=("top_$k")
    if ((k > 1)); then names+=("renormalize_$k"); fi  # with one token the renormalized distribution is constant
done
printf '%s\n' "${names[@]}" | xargs -P "$JOBS" -I{} bash -c 'set -euo pipefail; train {}'

python examples/sparse_teachers/draw.py "$RUNS" --out "$RUNS/quality.png"
