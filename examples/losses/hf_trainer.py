"""Distill with the Trainer of Hugging Face transformers: one process, one GPU or the CPU, no Megatron.

    python examples/losses/hf_trainer.py                                        # tiny models: seconds on a CPU
    python examples/losses/hf_trainer.py --teacher T --student S --text FILE --out OUT

Needs torch, transformers and accelerate.
"""

import argparse
from typing import Any

import torch
from distillation import Distillation, check_logits, supervised_tokens
from models import add_flags, setup
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments


class RowDataset(Dataset):
    """Rows of token ids; every token is supervised."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows.cpu()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class DistillationTrainer(Trainer):
    """A Trainer that minimizes the loss of a `Distillation`; logs and metrics also have its ce and kd."""

    loss_is_scaled_for_ga = True
    """The loss is divided by the supervised tokens of all accumulated microbatches."""

    def __init__(self, *args: Any, distillation: Distillation, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ValueError(
                f"{max(self.args.world_size, self.args.n_gpu)} GPUs: this example calls parts of the student past the "
                "wrapper that synchronizes gradients. Set CUDA_VISIBLE_DEVICES=0, or use pretrain_kd.py"
            )
        self.model_accepts_loss_kwargs = True  # so that the Trainer counts the supervised tokens of a step
        self._distillation = distillation
        self._sums = {"ce": 0.0, "kd": 0.0, "tokens": 0.0}

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """See `Trainer`. `num_items_in_batch` is the number of supervised tokens of the step."""
        student, labels = self.accelerator.unwrap_model(model), inputs["labels"]
        with self.accelerator.autocast():
            loss, output = self._distillation.loss(
                student, inputs["input_ids"], labels, inputs.get("attention_mask"), divisor=num_items_in_batch
            )
        if model.training:
            self._sums["ce"] += output.ce.sum().item()
            self._sums["kd"] += output.kd.sum().item()
            self._sums["tokens"] += supervised_tokens(labels).item()
        return (loss, {"loss": loss}) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `Trainer`: adds the means since the last line."""
        if "loss" in logs and self._sums["tokens"]:
            logs |= {name: self._sums[name] / self._sums["tokens"] for name in ("ce", "kd")}
            self._sums = dict.fromkeys(self._sums, 0.0)
        super().log(logs, *args, **kwargs)


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train the student. Returns the lines that the Trainer has logged."""
    parts = setup(args)
    for model in (parts.teacher, parts.student):
        check_logits(model, parts.rows[:1])
    options = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        logging_steps=max(1, args.steps // 3),
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = DistillationTrainer(
        parts.student,
        options,
        train_dataset=RowDataset(parts.rows),
        distillation=Distillation(parts.teacher, parts.tokens, ratio=0.9),
    )
    trainer.train()
    trainer.save_model()
    return trainer.state.log_history


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--out", default="runs/losses/trainer", metavar="DIR", help="(default: runs/losses/trainer)")
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
