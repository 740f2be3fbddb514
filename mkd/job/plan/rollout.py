"""Lines of the plan about texts that the student writes."""

from argparse import Namespace

from mkd.config.kd_config import KDConfig
from mkd.job.rollout.servers import rollout_folder
from mkd.rollout.engine.attention import reason_against_cache
from mkd.rollout.served.find import addresses_of


def rollout_plan(args: Namespace, kd: KDConfig) -> dict[str, str]:
    """Lines of the plan about texts that the student writes, label -> text."""
    what = [f"samples of {kd.sample_prompts}"] if kd.sample_prompts is not None else []
    what += [f"answers to {kd.eval_tasks}"] if kd.eval_tasks is not None else []
    what += [_on_policy_text(kd)] if kd.is_on_policy and kd.rollout_url is None else []
    reason = reason_against_cache(args)
    how = "with cached keys and values" if reason is None else f"one whole forward pass per token ({reason})"
    lines = {"writes": f"{', '.join(what)}: {how}"} if what else {}
    if kd.is_on_policy and kd.rollout_url is not None:
        servers, often = ", ".join(map(str, addresses_of(kd))), kd.rollout_refresh
        age = "every rollout" if often <= kd.rollout_steps else f"{often} steps"
        lines["servers"] = f"{_on_policy_text(kd)}: {servers}, new weights in {rollout_folder(args, kd)} after {age}"
    return lines


def _on_policy_text(kd: KDConfig) -> str:
    share = kd.on_policy_over_time
    rows = f"{share.start:.0%} of the rows" if share.shape == "constant" else f"a share of the rows, {share},"
    details = [f"{kd.rollout_samples} answers to each"] if kd.rollout_samples > 1 else []
    details += [f"for {kd.rollout_steps} steps at once"] if kd.rollout_steps > 1 else []
    details += ["cut-off ones are dropped"] if kd.rollout_cut_off == "drop" else []
    return f"{rows} from {kd.prompts}" + (f" ({', '.join(details)})" if details else "")
