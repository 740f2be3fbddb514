"""The position of the learning-rate schedule in a run that resumes without its optimizer's state."""

import inspect
from typing import Any


def keep_schedule_position() -> None:
    """Let the schedules of learning rate and weight decay continue at the run's samples with --no-load-optim.

    megatron-core 0.19 reads the schedule together with the optimizer's state. Without it the iteration and the position
    in the data continue, and the schedule begins anew: the rate warms up again, and does not reach its end.
    """
    from megatron.training import training

    load = training.load_checkpoint

    def load_with_position(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        megatron_args = training.get_args()
        scheduler = inspect.signature(load).bind(*args, **kwargs).arguments["opt_param_scheduler"]
        if scheduler is not None and megatron_args.no_load_optim and not megatron_args.finetune:
            # Steps are counted in samples, without those of steps that were skipped.
            scheduler.step(increment=megatron_args.consumed_train_samples - megatron_args.skipped_train_samples)
        return result

    training.load_checkpoint = load_with_position
