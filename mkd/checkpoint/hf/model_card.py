"""The README.md of an exported student: what it was made of, as far as the run wrote it down."""

import json
from pathlib import Path
from typing import Any

from mkd.checkpoint.megatron_folder import MegatronFolder

# Written by pretrain_kd.py into the --save folder
RUN_FILE, METRICS_FILE = "kd_config.json", "metrics.jsonl"
_FROM_PLAN = ("teacher", "student", "loss", "layers", "batch", "vocabulary")
_METRICS = ("loss", "ce", "kd", "valid_loss", "valid_ce", "valid_kd", "valid_teacher_ce", "valid_agreement")


def model_card(folder: MegatronFolder, name: str | None = None) -> str | None:
    """Markdown text for the model `name` (that of the --save folder); None when the checkpoint is of no distillation
    run."""
    root = folder.path if folder.iteration_dir != folder.path else folder.path.parent
    run = _read_json(root / RUN_FILE)
    if run is None:
        return None
    plan = run.get("plan") or {}
    digits = folder.iteration_dir.name.removeprefix("iter_")
    iteration = int(digits) if digits.isdigit() else 0
    records = _records(root / METRICS_FILE, iteration)
    last = _last_values(records)
    facts = {key: plan[key] for key in _FROM_PLAN if key in plan}
    if "loss" in facts:
        facts["loss"] = facts["loss"].partition(", computed by ")[0]
    facts["data"] = _data(vars(folder.args))
    facts["iteration"] = iteration
    facts["tokens"] = _tokens(records, iteration)
    rows = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in facts.items() if value]
    metrics = [f"| `{key}` | {last[key]:.4f} |" for key in _METRICS if key in last]
    parts = [
        "---\nlibrary_name: transformers\n---",
        f"# {name or root.resolve().name}",
        "A student trained by knowledge distillation. This card was written by the export and holds what the run wrote "
        "down; add what a reader needs to know: intended use, license, limits, evaluation.",
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


def _records(path: Path, until: int) -> list[dict[str, Any]]:
    """Lines of a metrics file up to an iteration; one that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("iteration"), int) and record["iteration"] <= until:
            records.append(record)
    return records


def _last_values(records: list[dict[str, Any]]) -> dict[str, float]:
    """The latest number under each name."""
    last: dict[str, float] = {}
    for record in records:
        last.update({name: value for name, value in record.items() if isinstance(value, int | float)})
    return last


def _tokens(records: list[dict[str, Any]], iteration: int) -> str | None:
    """Of all steps up to an iteration; None when those of some step are not known."""
    tokens = {record["iteration"]: record["tokens"] for record in records if "tokens" in record}
    is_known = iteration > 0 and tokens.keys() == set(range(1, iteration + 1))
    return f"{sum(tokens.values()):,.0f}" if is_known else None
