"""Installs all patches of Megatron, in two stages; `megatron.training.initialize_megatron` runs between them."""

from collections.abc import Sequence

from mkd.compat.checkpoints import CheckpointHooks, end_result_queues_with_their_rank, install_checkpoint_hooks
from mkd.compat.data_iterator import allow_finished_jobs, keep_random_state
from mkd.compat.experts import (
    add_router_biases_in_fp32,
    balance_experts_over_unequal_ranks,
    train_biased_experts_on_whole_ranks,
)
from mkd.compat.optimizer import (
    resume_distributed_optimizer,
    resume_experts_on_other_ranks,
    resume_sgd,
    save_before_the_first_update,
    use_own_learning_rates,
)
from mkd.compat.quiet import silence_megatron
from mkd.compat.schedule_position import keep_schedule_position
from mkd.compat.startup import read_help_texts_once, skip_warm_up, use_prebuilt_dataset_helpers
from mkd.compat.stopping import EvaluationState, StopSignals, install_stopping
from mkd.compat.training_loop import TrainingHooks, install_training_hooks


def install_at_start(argv: Sequence[str]) -> None:
    """Stage 1, before the command line is parsed. It imports megatron: the CPU backend must be in place.

    Args:
        argv: the command line, without the script's name.
    """
    silence_megatron(argv)
    use_prebuilt_dataset_helpers()
    skip_warm_up()
    read_help_texts_once()
    balance_experts_over_unequal_ranks()
    train_biased_experts_on_whole_ranks()
    add_router_biases_in_fp32()


def install(
    training: TrainingHooks,
    checkpoints: CheckpointHooks,
    stop: StopSignals,
    state: EvaluationState,
    *,
    own_learning_rates: bool,
) -> None:
    """Stage 2, after `initialize_megatron` and before `pretrain`.

    Args:
        training: schedule and metrics.
        checkpoints: called around each save.
        stop: signals that end the run after the current step.
        state: records an evaluation that was ended early.
        own_learning_rates: the job's rates replace the checkpoint's (--override-opt-param-scheduler).
    """
    resume_distributed_optimizer()
    resume_experts_on_other_ranks()
    resume_sgd()
    save_before_the_first_update()
    allow_finished_jobs()
    keep_random_state()
    keep_schedule_position()
    if own_learning_rates:
        use_own_learning_rates()
    install_training_hooks(training)
    end_result_queues_with_their_rank()
    install_checkpoint_hooks(checkpoints)
    install_stopping(stop, state)  # last: it wraps the functions that the training hooks have wrapped
