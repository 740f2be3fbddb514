"""Held-out quality of the students that run.sh has trained, against their teacher's whole distribution.

    python examples/sparse_teachers/evaluate.py --teacher DIR --start DIR --runs DIR --text valid.jsonl --out FILE

Every page is cut into pieces of 256 tokens. Of the second and later tokens of each: cross-entropy and
KL(teacher||student) in nats, both means, and how often both would say the same next token. Also each cache's
bytes a token.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

PIECE = 256


def pieces(text: Path, tokenizer_folder: Path) -> list[Tensor]:
    """[1, up to PIECE] token ids each."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    pages = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    ids = [torch.tensor([tokenizer(page)["input_ids"]]) for page in pages]
    return [piece for page in ids for piece in page.split(PIECE, dim=1) if piece.shape[1] > 1]


@torch.no_grad()
def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """[tokens - 1, V] of the next token."""
    return model(ids).logits[0, :-1].float().log_softmax(-1)


def quality(model: nn.Module, teacher: nn.Module, texts: list[Tensor], device: str) -> dict[str, float]:
    """Means over all predicted tokens."""
    sums, tokens = torch.zeros(3, dtype=torch.float64), 0
    for piece in texts:
        ids = piece.to(device)
        q, p = log_probs(model, ids), log_probs(teacher, ids)
        ce = -q.gather(1, ids[0, 1:, None]).sum()
        kl = (p.exp() * (p - q)).sum()
        same = (q.argmax(1) == p.argmax(1)).sum()
        sums += torch.stack([ce, kl, same]).double().cpu()
        tokens += len(q)
    return dict(zip(("ce", "kl", "agreement"), (sums / tokens).tolist(), strict=True))


def load(folder: Path, device: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def cache_bytes(folder: Path) -> float | None:
    """Bytes a token of a cache; None where there is none."""
    if not folder.is_dir():
        return None
    from mkd.teacher.store import TeacherStore

    store = TeacherStore(folder, "--runs")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / store.tokens


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("teacher", "start", "runs", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts, teacher = pieces(args.text, args.teacher), load(args.teacher, device)
    folders = {"teacher": args.teacher, "start": args.start}
    folders |= {path.parents[2].name: path.parent for path in sorted(args.runs.glob("*/hf/*/config.json"))}
    rows = {}
    for name, folder in folders.items():
        rows[name] = quality(load(folder, device), teacher, texts, device)
        rows[name]["cache_bytes_a_token"] = cache_bytes(args.runs / f"cache_{name}")
        print(name, {key: round(value, 4) for key, value in rows[name].items() if value is not None}, flush=True)
    args.out.write_text(json.dumps({"tokens": sum(t.shape[1] - 1 for t in texts), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
