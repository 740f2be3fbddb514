"""Saving in a job: its checkpoints, their exports during training, and the best one."""

from argparse import Namespace
from pathlib import Path

from mkd.checkpoint.adapters.export import write_snapshot
from mkd.checkpoint.hf.snapshot import Snapshots
from mkd.checkpoint.megatron.best import BestCheckpoint
from mkd.checkpoint.megatron.retention import Retention
from mkd.checkpoint.megatron.saving import Saving
from mkd.config.kd_config import KDConfig
from mkd.config.run_state import RunState
from mkd.job.resume.optimizer import RESHARDABLE
from mkd.utils.logging import logger


def best_checkpoint(args: Namespace, kd: KDConfig) -> BestCheckpoint | None:
    """The best checkpoint in --save so far; None without --kd-keep-best.

    Raises:
        MkdCheckpointError: the file that names it is damaged.
    """
    return None if kd.keep_best is None else BestCheckpoint(Path(args.save), kd.keep_best)


def prepare_saving(args: Namespace, kd: KDConfig, state: RunState, best: BestCheckpoint | None = None) -> Saving:
    """Claim the folder in --save and remove unfinished folders in it. Collective over all ranks.

    With --kd-keep-last, megatron's own removal is turned off: after each save it removes the previous checkpoint.

    Returns:
        The hooks around each save.
    """
    root, actions = Path(args.save or "."), []
    if kd.save_hf_interval is not None:
        write = None if kd.lora is None else write_snapshot
        snapshots = Snapshots(root, kd.save_hf_interval, kd.save_hf_keep, write)
        snapshots.clean()
        actions.append(snapshots.take)
    if best is not None:
        actions.append(best.published)
    if kd.keep_last is not None:
        retention = Retention(root, kd.keep_last, args.save_retain_interval, best)
        retention.clean()
        actions.append(retention.remove_old)
        args.save_retain_interval = None
    saving = Saving(root, hashes=not kd.skip_checkpoint_hashes, state=state, on_published=actions)
    if args.save is not None:
        saving.claim()
        if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
            logger.info(
                "checkpoints of this job can be resumed with other data- and context-parallel sizes; for other "
                f"tensor-, pipeline- and expert-parallel sizes give {RESHARDABLE} (docs/checkpoints.md)"
            )
    return saving
