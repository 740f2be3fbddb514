"""Write text, a new tokenizer and an untrained student, for a teacher with a different tokenizer.

    python examples/cross_tokenizer/make_student.py --out runs/cross_tokenizer

writes train.jsonl and valid.jsonl (CPython's reference pages and the sources of its standard library, one page or
module per line, each in one of the files) and student/: a byte-level BPE tokenizer with 8192 tokens trained on
train.jsonl, and a Llama model with random weights.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT_EVERY = 16
VOCAB = 8192
MODULE_CHARACTERS = range(2_000, 60_000)
END = "<|end|>"


def texts() -> Iterator[tuple[str, str]]:
    """(name, text) of each page, then of each module at the top of the standard library."""
    for name in sorted(topics):
        yield f"topic {name}", topics[name]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) in MODULE_CHARACTERS:
            yield f"module {path.stem}", text


def write_text(out: Path) -> list[str]:
    """Write both files and return the training texts."""
    everything = list(texts())
    held_out = everything[2::HELD_OUT_EVERY]
    kept = [item for item in everything if item not in held_out]
    for name, items in (("train", kept), ("valid", held_out)):
        lines = [json.dumps({"name": title, "text": text}) + "\n" for title, text in items]
        (out / f"{name}.jsonl").write_text("".join(lines))
        print(f"{out / name}.jsonl: {len(items)} texts, {sum(len(text) for _, text in items):,} characters")
    return [text for _, text in kept]


def train_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, which splits text differently than the teacher's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(write_text(args.out))
    model = make_model(args.seed)
    for part in (tokenizer, model):
        part.save_pretrained(args.out / "student")
    print(f"{args.out / 'student'}: {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
