#!/usr/bin/env bash
# Does it pay to let the student write the texts? Trains a teacher on an arithmetic task until it solves nearly all
# problems, a student of a fifth of its size for a short time on text, and then the same student for the same number of
# updates with each method: text alone, a teacher on given texts, a teacher on texts of the student, and a mix.
#
#   bash examples/on_policy/run.sh             # two CPU cores, 6 minutes after the installation
#   bash examples/on_policy/run.sh --full      # one GPU: larger models, more updates
#
# All output goes to runs/on_policy (RUNS): results.json, accuracy.png, and a folder per training. With OUT=DIR the
# results are copied there. Every run starts from the beginning. The variables below change the amount of work; JOBS
# trainings run at a time, and those that have not ended after TIME_LIMIT seconds are stopped, results so far are kept.
# LR and MIN_LR are the learning rates of the methods.
# MKD_SKIP_SETUP=1 takes the python and torchrun on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

case ${1:-} in
    "")
        FORM=small
        export MKD_DEVICE=cpu
        SIZES=small TEACHER_LR=3e-3 DIGITS=${DIGITS:-3} ROWS=${ROWS:-64} PRECISION=${PRECISION:-}
        TEACHER_STEPS=${TEACHER_STEPS:-400} START_STEPS=${START_STEPS:-300} STEPS=${STEPS:-100} EVALS=${EVALS:-4}
        SEEDS=${SEEDS:-"1 2 3"} JOBS=${JOBS:-2} TIME_LIMIT=${TIME_LIMIT:-1200}
        METHODS=${METHODS:-"written mixed given text"}
        ;;
    --full)
        FORM=full
        SIZES=large TEACHER_LR=2e-3 DIGITS=${DIGITS:-4} ROWS=${ROWS:-128} PRECISION=${PRECISION---bf16}
        TEACHER_STEPS=${TEACHER_STEPS:-2000} START_STEPS=${START_STEPS:-300} STEPS=${STEPS:-300} EVALS=${EVALS:-10}
        SEEDS=${SEEDS:-"1 2 3"} JOBS=${JOBS:-18} TIME_LIMIT=${TIME_LIMIT:-430}
        METHODS=${METHODS:-"written written_jsd mixed given given_reverse text"}
        ;;
    *) echo "run.sh: unknown argument $1: give --full or nothing" >&2; exit 2 ;;
esac
RUNS=${RUNS:-runs/on_policy} LR=${LR:-2e-3} MIN_LR=${MIN_LR:-1e-4}
ANSWER=$((7 * DIGITS + DIGITS + 2))                  # tokens of an answer
LENGTH=$(((3 + 2 * DIGITS + ANSWER + 3) / 4 * 4))    # and of a problem with its answer
export RUNS LR MIN_LR STEPS TEACHER_STEPS START_STEPS EVALS TIME_LIMIT
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore

step() { printf '\n\033[1m[%3d s] %s\033[0m\n' "$SECONDS" "$*"; }

if [[ -z "${MKD_SKIP_SETUP:-}" ]]; then
    bash tools/setup_env.sh
    export PATH="$PWD/.venv/bin:$PATH"
fi
BEGAN=$(date +%s)
export BEGAN

rm -rf "${RUNS:?}"
mkdir -p "$RUNS"
keep() {  # copy the results to OUT, those of a run that fails too
    if [[ -n "${OUT:-}" && -d $RUNS ]]; then
        mkdir -p "$OUT"
        tail -n 40 "$RUNS"/*.txt > "$OUT/logs.txt" 2>/dev/null || true
        (cd "$RUNS" && tar -czf - ./*/metrics.jsonl) > "$OUT/metrics.tar.gz" 2>/dev/null || true
        for file in results.json accuracy.png; do [[ ! -f $RUNS/$file ]] || cp "$RUNS/$file" "$OUT/"; done
    fi
}
trap keep EXIT

# ---------------------------------------------------------------------------------------------------------------------
# Problems, tokenizer, and models with random weights. Seconds.

step "Task: sums of two numbers of $DIGITS digits"
# shellcheck disable=SC2086  # SEEDS is a list
python examples/on_policy/make_task.py --out "$RUNS" --sizes $SIZES --digits "$DIGITS" --seeds $SEEDS

export FLAGS="--train-data-path $RUNS/train.jsonl --valid-data-path $RUNS/valid.jsonl
    --seq-length $LENGTH --micro-batch-size $ROWS --global-batch-size $ROWS --make-vocab-size-divisible-by 16
    --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.01 --adam-beta2 0.98 --clip-grad 1.0
    --eval-iters 1 --kd-eval-tasks $RUNS/tasks.jsonl --kd-eval-tokens $ANSWER --num-workers 0 --log-interval 10 --kd-loss-impl eager
    $PRECISION"
export WRITING="--kd-prompts $RUNS/prompts.jsonl --kd-rollout-tokens $ANSWER"

train() {  # train NAME FLAG...
    local name=$1 left=$((BEGAN + TIME_LIMIT - $(date +%s)))
    shift
    # shellcheck disable=SC2086  # FLAGS is a list
    timeout -k 20 $((left > 1 ? left : 1)) torchrun --standalone --nproc-per-node 1 -m mkd train $FLAGS "$@" \
        > "$RUNS/$name.txt" 2>&1 || {
        echo "$name: exit status $? after $(($(date +%s) - BEGAN)) s: $(grep -m 1 error: "$RUNS/$name.txt")" >&2
        return 0
    }
    echo "$name: done after $(($(date +%s) - BEGAN)) s"
}

# Cross-entropy alone (R = 0) does not run the teacher that the flags name.
first() {  # first NAME SEED STEPS LR: random weights, trained on text; a Hugging Face folder and a checkpoint
    train "$1" --kd-teacher-hf "$RUNS/$1-0" --kd-student-hf "$RUNS/$1-0" --kd-ratio 0 --seed "$2" --train-iters "$3" \
        --lr "$4" --min-lr 1e-4 --eval-interval $((($3 + 1) / 2)) --save "$RUNS/$1" --save-interval "$3" --kd-save-hf-interval "$3"
}

second() {  # second METHOD SEED: the trained student with one method
    local kd=() seed=$2 teacher student writing
    read -ra writing <<< "$WRITING"
    teacher=("$RUNS"/teacher/hf/iter_*)
    student=("$RUNS/student-$seed"/hf/iter_*)
    case $1 in
        text) kd=(--kd-ratio 0) ;;
        given) kd=(--kd-ratio 1 --kd-loss forward_kl) ;;
        given_reverse) kd=(--kd-ratio 1 --kd-loss reverse_kl) ;;
        written) kd=(--kd-ratio 1 --kd-loss reverse_kl --kd-on-policy 1 "${writing[@]}") ;;
        written_jsd) kd=(--kd-ratio 1 --kd-loss jsd --kd-on-policy 1 "${writing[@]}") ;;
        mixed) kd=(--kd-ratio 1 --kd-loss reverse_kl --kd-on-policy 0.5 "${writing[@]}") ;;
        *) echo "run.sh: unknown method $1" >&2; return 1 ;;
    esac
    mkdir -p "$RUNS/$1-$seed"
    train "$1-$seed" --kd-teacher-hf "${teacher[0]}" --kd-student-hf "${student[0]}" "${kd[@]}" --seed "$((10 + seed))" \
        --train-iters "$STEPS" --lr "$LR" --min-lr "$MIN_LR" --eval-interval $((STEPS / EVALS)) \
        --kd-metrics-file "$RUNS/$1-$seed/metrics.jsonl"
}
export -f train first second

# ---------------------------------------------------------------------------------------------------------------------
# The teacher, and each student on text until it writes the form of an answer, but few right ones.

step "Teacher: $TEACHER_STEPS updates on text; student: $START_STEPS"
{
    echo "teacher 9 $TEACHER_STEPS $TEACHER_LR"
    for seed in $SEEDS; do echo "student-$seed $seed $START_STEPS 5e-3"; done
} | xargs -P "$JOBS" -L 1 bash -c 'set -euo pipefail; first "$@"' _
[[ -d $RUNS/teacher/hf ]] || { echo "run.sh: no teacher; see $RUNS/teacher.txt" >&2; exit 1; }

# ---------------------------------------------------------------------------------------------------------------------
# The same updates from the same student with each method.

step "Student: $STEPS updates with each of: $METHODS"
for seed in $SEEDS; do
    for method in $METHODS; do echo "$method $seed"; done
done | xargs -P "$JOBS" -L 1 bash -c 'set -euo pipefail; second "$@"' _

step "Results"
# shellcheck disable=SC2086
python examples/on_policy/collect.py "$RUNS" --form $FORM --methods $METHODS --seeds $SEEDS --out "$RUNS/results.json"
python examples/on_policy/draw.py "$RUNS/results.json" --out "$RUNS/accuracy.png" \
    || echo "run.sh: no figure; draw it elsewhere: python examples/on_policy/draw.py $RUNS/results.json --out accuracy.png" >&2
step "Done: $RUNS/results.json, $RUNS/accuracy.png"
