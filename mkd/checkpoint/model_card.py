"""The README.md of an exported student: what it was made of, as far as the run wrote it down."""

import json
from pathlib import Path
from typing import Any

from mkd.checkpoint.megatron_folder import MegatronFolder

# Written by pretrain_kd.py into the --save folder
RUN_FILE, METRICS_FILE = "kd_config.json", "metrics.jsonl"
_FROM_PLAN = ("teacher", "student", "loss", "layers", "batch", "vocabulary")
_METRICS = ("loss", "ce", "kd", "valid_loss", "valid_ce", "valid_kd", "valid_teacher_ce", "valid_agreement")


def model_card(folder: MegatronFolder, name: str) -> str | None:
    """Markdown text for the model `name`; None when the checkpoint is of no distillation run."""
    root = folder.path if folder.iteration_dir != folder.path else folder.path.parent
    run = _read_json(root / RUN_FILE)
    if run is None:
        return None
    plan = run.get("plan") or {}
    last = _last_values(root / METRICS_FILE)
    facts = {key: plan[key] for key in _FROM_PLAN if key in plan}
    facts["data"] = _data(vars(folder.args))
    facts["iteration"] = folder.iteration_dir.name.removeprefix("iter_").lstrip("0")
    if "tokens" in last:
        facts["tokens"] = f"{last['tokens']:,.0f}"
    rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in facts.items() if value]
    metrics = [f"| `{key}` | {last[key]:.4f} |" for key in _METRICS if key in last]
    parts = [
        "---\nlibrary_name: transformers\n---",
        f"# {name}",
        "A student trained by knowledge distillation. This card was written by the export and holds what the run wrote "
        "down; add what a reader needs to know: intended use, licence, limits, evaluation.",
        "| | |\n|---|---|\n" + "\n".join(rows),
    ]
    if metrics:
        parts.append("Last values of the run:\n\n| metric | value |\n|---|---|\n" + "\n".join(metrics))
    return "\n\n".join(parts) + "\n"


def _data(args: dict[str, Any]) -> str:
    """Names of the training data, without the folders they lay in."""
    words = args.get("data_path") or args.get("train_data_path") or []
    return " ".join(Path(str(word)).name for word in words)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _last_values(path: Path) -> dict[str, float]:
    """The latest number under each name in a metrics file; a line cut off at the end is left out."""
    last: dict[str, float] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "iteration" in record:
            last.update({name: value for name, value in record.items() if isinstance(value, int | float)})
    return last
