"""`mkd train`: one rank of a training job; torchrun starts several."""

import sys

from mkd.utils.missing_packages import needs_packages

HELP = """\
usage: mkd train FLAG ...                                     one process, on a GPU or without one
       torchrun --nproc-per-node N -m mkd train FLAG ...      N ranks on this node

Train a student from a frozen teacher with Megatron-LM. The flags below are the ones that matter first; --help-all
lists all of them, Megatron's own included, and docs/flags.md describes those of mkd.

models
  --kd-teacher-hf DIR               teacher: a Hugging Face folder (or --kd-teacher-load, -cache or -url)
  --kd-student-hf DIR               student: initial weights, architecture and tokenizer
  --kd-xtoken-loss                  the teacher has a different tokenizer

loss
  --kd-ratio R                      loss = (1 - R) CE + R KD, 0 <= R <= 1
  --kd-loss D                       forward_kl (default), reverse_kl, jsd, skew_forward_kl, skew_reverse_kl or tvd
  --kd-temperature T                temperature of both models in KD (1)

data
  --data-path FILE|PREFIX ...       chats (JSON, parquet), or PREFIX of mkd preprocess; several with weights
  --split TRAIN,VALID,TEST          shares of the data, such as 99,1,0
  --seq-length N                    tokens per row
  --kd-packing best_fit             several whole samples share a row

steps
  --train-iters N                   optimizer steps (or --kd-epochs E)
  --global-batch-size N             rows per step, over all ranks
  --micro-batch-size N              rows per forward pass on one rank
  --lr X, --min-lr X                learning rate, with --lr-decay-style cosine --lr-warmup-iters N
  --bf16                            bf16 weights and activations; leave it out on CPU

checkpoints and evaluation
  --save DIR, --load DIR            the same folder in both: the same command resumes
  --save-interval N                 steps between checkpoints
  --eval-interval N, --eval-iters N steps between evaluations, and their length
  --kd-keep-last N                  checkpoints to keep
  --kd-save-hf-interval N           also write a Hugging Face folder
  --kd-sample-prompts FILE          prompts that the student continues at each evaluation
  --kd-eval-tasks FILE              tasks with answers: the accuracy is measured at each evaluation

parallel layout
  --tensor-model-parallel-size N    with --sequence-parallel
  --pipeline-model-parallel-size N, --context-parallel-size N, --expert-model-parallel-size N
  --use-distributed-optimizer       optimizer state sharded over data-parallel ranks

before and instead of training
  --kd-config FILE                  flags from a YAML file; the command line wins. SAVE/run.yaml repeats a run
  --kd-dry-run                      check everything, print the plan and the memory, and exit
"""


def main(argv: list[str] | None = None) -> int:
    """Run one rank, or show one page of help; --help-all shows all flags. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        print(HELP, end="")
        return 0
    with needs_packages():
        from mkd.cli.train_job import run

    sys.argv[1:] = ["--help" if word == "--help-all" else word for word in words]
    return run()
