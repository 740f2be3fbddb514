"""Compare padded rows, rows trimmed to the longest text of a microbatch, and packed rows: real tokens per second.

    python benchmarks/bench_packing.py --json packing.json

The text is real: names and docstrings of Python's standard library as prompts and answers of very different lengths,
tokenized with a byte-level BPE that is trained on it. Models have random weights. Each table row is one run of
pretrain_kd.py on one device with the same models, data and flags except --kd-packing and --kd-variable-seq-lengths.
Real tokens are those that are not padding.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_common import Row, markdown
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
CASES = {
    "padded": ["--kd-packing", "none"],
    "trimmed to the longest": ["--kd-packing", "none", "--kd-variable-seq-lengths"],
    "packed": ["--kd-packing", "best_fit"],
}
COLUMNS = [
    ("rows", lambda row: row["name"]),
    ("real tokens per row", lambda row: f"{row['filled']:.1%}"),
    ("ms per step", lambda row: f"{row['step_ms']:.0f}"),
    ("real tokens/s", lambda row: f"{row['real_tokens_per_s']:,.0f}"),
    ("x padded", lambda row: f"{row['speedup']:.2f}"),
    ("peak GiB", lambda row: f"{row['peak_gib']:.2f}"),
]
SHAPES = {
    "teacher": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_key_value_heads=8),
    "student": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_key_value_heads=4),
}
SMALL = {
    "teacher": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_key_value_heads=8),
    "student": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_key_value_heads=4),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=4096, metavar="N", help="tokens per row (default: 4096)")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N", help="rows (default: 4)")
    parser.add_argument("--global-batch-size", type=int, default=16, metavar="N", help="rows (default: 16)")
    parser.add_argument(
        "--steps", type=int, default=16, metavar="N", help="steps; the median of all after the fifth is reported"
    )
    parser.add_argument("--vocab", type=int, default=32000, metavar="V", help="vocabulary of the trained tokenizer")
    parser.add_argument("--samples", type=int, metavar="N", help="conversations (default: all)")
    parser.add_argument("--small", action="store_true", help="tiny models in fp32, a smoke test on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    if args.steps < 7:
        parser.error(f"--steps is {args.steps}; at least 7 are needed, since the first five are not counted")
    return args


def conversations() -> Iterator[dict[str, str]]:
    """Prompt and completion of every documented class and function of the standard library."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield {"prompt": f"What does {node.name} in {file.name} do?", "completion": text}


def prepare(folder: Path, args: argparse.Namespace) -> Path:
    """Write text, tokenizer and models to a folder; returns the path of the text."""
    records = list(conversations())[: args.samples]
    text = folder / "chat.jsonl"
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([r["prompt"] + r["completion"] for r in records], args.vocab, special_tokens=["<|end|>"])
    bpe.save(str(folder / "bpe.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe.json"), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    for name, shape in (SMALL if args.small else SHAPES).items():
        config = LlamaConfig(
            vocab_size=args.vocab,
            num_attention_heads=8 if args.small else 16,
            max_position_embeddings=args.seq_length,
            tie_word_embeddings=name == "student",
            **shape,
        )
        torch.manual_seed(len(name))
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return text


def run(name: str, flags: list[str], folder: Path, text: Path, args: argparse.Namespace) -> Row:
    """Figures of one training run.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    metrics = folder / "metrics.jsonl"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", str(ROOT / "pretrain_kd.py")),
        *("--kd-ratio", "0.5", *flags),
        *("--kd-teacher-hf", str(folder / "teacher"), "--kd-student-hf", str(folder / "student")),
        *("--kd-metrics-file", str(metrics), "--data-path", str(text), "--split", "95,5,0"),
        *("--seq-length", str(args.seq_length), "--micro-batch-size", str(args.micro_batch_size)),
        *("--global-batch-size", str(args.global_batch_size), "--train-iters", str(args.steps), "--lr", "1e-4"),
        *("--eval-iters", "0", "--eval-interval", "1000", *([] if args.small else ["--bf16"])),
    ]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    filled = re.search(r"data +training .* rows, ([\d.]+)% of them tokens", done.stdout)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    rate = statistics.median(line["tokens_per_s"] for line in lines[5:])
    return {
        "name": name,
        "filled": float(filled[1]) / 100.0,
        "step_ms": 1e3 * args.global_batch_size * args.seq_length / rate,
        "real_tokens_per_s": rate * float(filled[1]) / 100.0,
        "peak_gib": lines[-1]["peak_memory_gib"],
    }


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = prepare(folder, args)
        rows: list[Row] = []
        for name, flags in CASES.items():
            print(f"bench_packing: {name}", file=sys.stderr, flush=True)
            rows.append(run(name, flags, folder, text, args))
            rows[-1]["speedup"] = rows[-1]["real_tokens_per_s"] / rows[0]["real_tokens_per_s"]
    card = "CPU" if args.small else torch.cuda.get_device_name()
    print(f"{card}, rows of {args.seq_length} tokens, microbatches of {args.micro_batch_size} rows\n")
    print(markdown(COLUMNS, rows))
    if args.json is not None:
        args.json.write_text(
            json.dumps({"card": card, "flags": vars(args), "rows": rows}, indent=2, default=str) + "\n"
        )


if __name__ == "__main__":
    main()
