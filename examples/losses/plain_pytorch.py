"""Distill in a training loop of plain PyTorch: one process, one GPU or the CPU, no Megatron.

    python examples/losses/plain_pytorch.py                                     # tiny models: seconds on a CPU
    python examples/losses/plain_pytorch.py --teacher T --student S --text FILE --out OUT

Needs torch and transformers.
"""

import argparse

import torch
from distillation import Distillation, check_logits, supervised_tokens
from models import add_flags, setup

from mkd.losses import LossSpec

MICROBATCHES, ROWS = 2, 4
"""Microbatches per step, and rows of each."""


def train(args: argparse.Namespace) -> list[float]:
    """Train the student. Returns KD per token, step by step."""
    parts = setup(args)
    spec = LossSpec(divergence=args.loss, temperature=args.temperature)
    distillation = Distillation(parts.teacher, parts.tokens, args.ratio, spec)
    for model in (parts.teacher, parts.student):
        check_logits(model, parts.rows[:1])
    optimizer = torch.optim.AdamW(parts.student.parameters(), lr=args.lr)
    divergences = []
    for step in range(1, args.steps + 1):
        batch = [parts.rows[torch.randint(len(parts.rows), (ROWS,))] for _ in range(MICROBATCHES)]
        divisor = sum(supervised_tokens(rows) for rows in batch)  # of the whole step: the loss is divided once
        ce = kd = 0.0
        for rows in batch:
            loss, output = distillation.loss(parts.student, rows, rows, divisor=divisor)
            loss.backward()
            ce, kd = ce + output.ce.sum().item(), kd + output.kd.sum().item()
        norm = torch.nn.utils.clip_grad_norm_(parts.student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(kd / divisor.item())
        if step == 1 or step % 10 == 0:
            print(f"step {step:4d} | ce {ce / divisor:.4f} | kd {kd / divisor:.4f} | grad norm {norm:.3f}", flush=True)
    if args.out is not None:
        parts.student.save_pretrained(args.out)
    return divergences


def main(argv: list[str] | None = None) -> list[float]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--ratio", type=float, default=0.9, help="R: the loss is (1 - R) CE + R T^2 KD (default: 0.9)")
    parser.add_argument("--loss", default="forward_kl", help="divergence, see docs/losses.md (default: forward_kl)")
    parser.add_argument("--temperature", type=float, default=1.0, help="T of both distributions (default: 1)")
    parser.add_argument("--out", metavar="DIR", help="write the trained student there")
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
