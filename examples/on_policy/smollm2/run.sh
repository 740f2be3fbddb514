#!/usr/bin/env bash
# SmolLM2-135M-Instruct teaches its half to answer questions about CPython's documentation: first with its own answers,
# until the half can write again, and then for the same number of updates with each method: its answers as text, its
# answers with its distributions, the student's own answers with its distributions, and a mix.
#
#   bash examples/on_policy/smollm2/run.sh           # two CPU cores, 12 GB of memory, 32 minutes of processor time
#   bash examples/on_policy/smollm2/run.sh --full    # one GPU: longer answers, more updates, 6.5 minutes on an H200
#
# All output goes to runs/smollm2 (RUNS): results.json, smollm2.png, samples.md, and a folder per training. What is
# there already is kept, and trainings that were interrupted resume; delete the folder to start again. With OUT=DIR the
# results are copied there. The variables below change the amount of work; JOBS commands run at a time, and trainings
# that have not ended after TIME_LIMIT seconds are stopped. KEEP lists the layers of the teacher that are the student.
# TEACHER names a folder that has the teacher already. MKD_SKIP_SETUP=1 takes the python and torchrun on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

case ${1:-} in
    "")
        FORM=small
        export MKD_DEVICE=cpu
        QUESTIONS=${QUESTIONS:-128} SAMPLES=${SAMPLES:-1} HELD_OUT=${HELD_OUT:-32} TOKENS=${TOKENS:-64} BATCH=${BATCH:-32}
        LENGTH=${LENGTH:-144} ROWS=${ROWS:-8} RANKS=${RANKS:-2} PRECISION=${PRECISION:-} JOBS=${JOBS:-2}
        START_STEPS=${START_STEPS:-40} STEPS=${STEPS:-15} EVALS=${EVALS:-1} TIME_LIMIT=${TIME_LIMIT:-7200}
        METHODS=${METHODS:-"written given text"}
        ;;
    --full)
        FORM=full
        QUESTIONS=${QUESTIONS:-10000} SAMPLES=${SAMPLES:-4} HELD_OUT=${HELD_OUT:-128} TOKENS=${TOKENS:-128} BATCH=${BATCH:-4096}
        LENGTH=${LENGTH:-208} ROWS=${ROWS:-64} RANKS=${RANKS:-1} PRECISION=${PRECISION---bf16} JOBS=${JOBS:-5}
        START_STEPS=${START_STEPS:-270} STEPS=${STEPS:-80} EVALS=${EVALS:-4} TIME_LIMIT=${TIME_LIMIT:-1200}
        METHODS=${METHODS:-"written given given_reverse mixed text"}
        ;;
    *) echo "run.sh: unknown argument $1: give --full or nothing" >&2; exit 2 ;;
esac
START_LR=${START_LR:-6e-4} LR=${LR:-2e-4}
KEEP=${KEEP:-0,1,2,3,4,5,6,22,23,24,25,26,27,28,29}
RUNS=${RUNS:-runs/smollm2}
TEACHER=${TEACHER:-$RUNS/teacher}
HERE=examples/on_policy/smollm2 DATA=$RUNS/data
export RUNS DATA TEACHER HERE TOKENS BATCH ROWS START_STEPS STEPS EVALS START_LR LR TIME_LIMIT
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore

step() { printf '\n\033[1m[%3d s] %s\033[0m\n' "$SECONDS" "$*"; }

if [[ -z "${MKD_SKIP_SETUP:-}" ]]; then
    bash tools/setup_env.sh
    export PATH="$PWD/.venv/bin:$PATH"
fi
BEGAN=$(date +%s)
export BEGAN

mkdir -p "$DATA"
keep() {  # copy the results to OUT, those of a run that fails too
    if [[ -n "${OUT:-}" ]]; then
        mkdir -p "$OUT"
        tail -n 40 "$RUNS"/*.txt > "$OUT/logs.txt" 2>/dev/null || true
        (cd "$RUNS" && tar -czf - ./*/metrics.jsonl ./*/answers.jsonl data/teacher.held_out.jsonl data/teacher.greedy.jsonl) > "$OUT/runs.tar.gz" 2>/dev/null || true
        for file in results.json smollm2.png samples.md; do [[ ! -f $RUNS/$file ]] || cp "$RUNS/$file" "$OUT/"; done
    fi
}
trap keep EXIT

# ---------------------------------------------------------------------------------------------------------------------
# Models: the teacher is the one of the quickstart, the student half of its layers. The first seven and the last eight
# layers are a better start than every second one (README.md).

if [[ ! -d $TEACHER ]]; then
    step "Teacher: SmolLM2-135M-Instruct to $TEACHER"
    python examples/quickstart/make_teacher.py --out "$TEACHER"
fi
if [[ ! -d $RUNS/pruned ]]; then
    step "Student: layers $KEEP of the teacher, to $RUNS/pruned"
    python tools/prune.py depth --hf "$TEACHER" --out "$RUNS/pruned" --layers "$KEEP"
fi

# ---------------------------------------------------------------------------------------------------------------------
# Texts: answers of the teacher, sampled at temperature 1. Only those that end within TOKENS are learned from as given
# texts: a conversation's answer ends with an end token in the data.

step "Questions about Python's documentation"
python $HERE/make_questions.py --out "$DATA" --train "$QUESTIONS" --held-out "$HELD_OUT"
head -n 32 "$DATA/held_out.questions.jsonl" > "$DATA/sample.questions.jsonl"

answer() {  # answer HF QUESTIONS OUT FLAG...: unless the answers are there
    local hf=$1 questions=$2 out=$3
    shift 3
    [[ -f $out ]] || python $HERE/answers.py --hf "$hf" --questions "$questions" --out "$out" --tokens "$TOKENS" --batch "$BATCH" "$@"
}
export -f answer

step "Answers of the teacher"
xargs -P "$JOBS" -L 1 bash -c 'set -euo pipefail; answer "$@"' _ << EOF
$TEACHER $DATA/train.questions.jsonl $DATA/teacher.train.jsonl --samples $SAMPLES
$TEACHER $DATA/held_out.questions.jsonl $DATA/teacher.held_out.jsonl --seed 2
$TEACHER $DATA/sample.questions.jsonl $DATA/teacher.greedy.jsonl --temperature 0
EOF
for part in train held_out; do
    grep '"ended": true' "$DATA/teacher.$part.jsonl" > "$DATA/$part.jsonl" || {
        echo "run.sh: no answer of $TEACHER in $DATA/teacher.$part.jsonl ended within $TOKENS tokens: give more TOKENS" >&2
        exit 1
    }
    echo "$DATA/$part.jsonl: $(wc -l < "$DATA/$part.jsonl") answers that ended"
done

# ---------------------------------------------------------------------------------------------------------------------
# Training.

export FLAGS="--train-data-path $DATA/train.jsonl --valid-data-path $DATA/held_out.jsonl --seq-length $LENGTH
    --global-batch-size $ROWS --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.01 --adam-beta2 0.95
    --clip-grad 1.0 --eval-iters 1 --kd-sample-prompts $DATA/sample.questions.jsonl --kd-sample-tokens $TOKENS
    --num-workers 0 --log-interval 5 --kd-keep-last 1 $PRECISION"

train() {  # train NAME STUDENT RANKS STEPS LR FLAG...: unless it has ended; an interrupted training resumes
    local name=$1 student=$2 ranks=$3 steps=$4 lr=$5 left=$((BEGAN + TIME_LIMIT - $(date +%s))) out=$RUNS/$1
    shift 5
    if compgen -G "$out/hf/iter_*" > /dev/null; then return 0; fi
    # shellcheck disable=SC2086  # FLAGS is a list
    timeout -k 20 $((left > 1 ? left : 1)) torchrun --standalone --nproc-per-node "$ranks" -m mkd train $FLAGS \
        --kd-teacher-hf "$TEACHER" --kd-student-hf "$student" --micro-batch-size $((ROWS / ranks)) --train-iters "$steps" --lr "$lr" \
        --eval-interval $((steps / EVALS)) --save "$out" --load "$out" --save-interval "$steps" --kd-save-hf-interval "$steps" "$@" \
        > "$out.txt" 2>&1 || {
        echo "$name: exit status $? after $(($(date +%s) - BEGAN)) s: $(grep -m 1 error: "$out.txt")" >&2
        return 0
    }
    echo "$name: done after $(($(date +%s) - BEGAN)) s"
}

second() {  # second METHOD: the student of the first training, with one method
    local kd=() student
    student=("$RUNS"/start/hf/iter_*)
    case $1 in
        text) kd=(--kd-ratio 0) ;;
        given) kd=(--kd-ratio 1 --kd-loss forward_kl) ;;
        given_reverse) kd=(--kd-ratio 1 --kd-loss reverse_kl) ;;
        written) kd=(--kd-ratio 1 --kd-loss reverse_kl --kd-on-policy 1) ;;
        mixed) kd=(--kd-ratio 1 --kd-loss reverse_kl --kd-on-policy 0.5) ;;
        *) echo "run.sh: unknown method $1" >&2; return 1 ;;
    esac
    [[ " ${kd[*]} " != *on-policy* ]] || kd+=(--kd-prompts "$DATA/train.questions.jsonl" --kd-rollout-tokens "$TOKENS")
    train "$1" "${student[0]}" 1 "$STEPS" "$LR" "${kd[@]}" --seed 11
}

last() {  # last NAME: answers to the held-out questions, sampled at temperature 1 from a student
    local student
    if [[ $1 == pruned ]]; then student=("$RUNS/pruned"); else student=("$RUNS/$1"/hf/iter_*); fi
    [[ ! -d ${student[0]} ]] || answer "${student[0]}" "$DATA/held_out.questions.jsonl" "$RUNS/$1/answers.jsonl" --seed 2
}
export -f train second last

step "Student: $START_STEPS updates on answers of the teacher, forward KL"
train start "$RUNS/pruned" "$RANKS" "$START_STEPS" "$START_LR" --kd-ratio 1 --kd-loss forward_kl --seed 1
compgen -G "$RUNS/start/hf/iter_*" > /dev/null || { echo "run.sh: no student; see $RUNS/start.txt" >&2; exit 1; }

step "Student: $STEPS updates with each of: $METHODS"
for method in $METHODS; do echo "$method"; done | xargs -P "$JOBS" -L 1 bash -c 'set -euo pipefail; second "$@"' _

step "Answers of the students"
for name in pruned start $METHODS; do echo "$name"; done | xargs -P "$JOBS" -L 1 bash -c 'set -euo pipefail; last "$@"' _

step "Results"
# shellcheck disable=SC2086  # METHODS is a list
python $HERE/collect.py "$RUNS" --teacher "$TEACHER" --form $FORM --methods $METHODS --out "$RUNS/results.json" --samples "$RUNS/samples.md"
python $HERE/draw.py "$RUNS/results.json" --out "$RUNS/smollm2.png" \
    || echo "run.sh: no figure; draw it elsewhere: python $HERE/draw.py $RUNS/results.json --out smollm2.png" >&2
step "Done: $RUNS/results.json, $RUNS/samples.md, $RUNS/smollm2.png"
