"""Write an arithmetic task with checkable answers, a tokenizer, and an untrained teacher and student.

    python examples/on_policy/make_task.py --out runs/on_policy

Each problem is the addition of two numbers, each answer the addition digit by digit, lowest digit first, and the sum:

    483+729=  3+9=12;8+2=11;4+7=12;1212

In a step, `a+b=cd`, the digits a and b and the carry of the step before it are added; c is the next carry and d a digit
of the sum.

Written are train.jsonl and valid.jsonl (conversations), prompts.jsonl (the problems of train.jsonl without answers),
tasks.jsonl (the problems of valid.jsonl for --kd-eval-tasks), and Hugging Face folders with random weights:
teacher-0, and student-SEED-0 for each seed.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

START, END, UNKNOWN = "<start>", "<end>", "<unknown>"
SYMBOLS = "0123456789+=;"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% else %}="
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
SIZES = {
    "small": {"teacher": (128, 384, 3, 4), "student": (64, 192, 2, 2)},
    "large": {"teacher": (256, 704, 4, 4), "student": (128, 352, 3, 2)},
}
"""Hidden size, FFN size, layers and attention heads; a student has about a fifth of the parameters of its teacher."""


def worked_sum(first: int, second: int, digits: int) -> str:
    """The addition of two numbers of at most `digits` digits, digit by digit, and their sum."""
    steps, carry = [], 0
    for a, b in zip(reversed(f"{first:0{digits}}"), reversed(f"{second:0{digits}}"), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}={total:02};")
        carry = total // 10
    return "".join(steps) + f"{first + second:0{digits + 1}}"


def problems(count: int, digits: int, seed: int) -> list[tuple[int, int]]:
    """Different pairs of numbers below 10 ** digits."""
    generator, limit = random.Random(seed), 10**digits
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        found[generator.randrange(limit), generator.randrange(limit)] = None
    return list(found)


def problem_text(first: int, second: int, digits: int) -> str:
    """A problem without the equals sign, which the chat template adds."""
    return f"{first:0{digits}}+{second:0{digits}}"


def conversation(first: int, second: int, digits: int) -> dict:
    """A problem and its answer."""
    return {"prompt": problem_text(first, second, digits), "completion": worked_sum(first, second, digits)}


def question(first: int, second: int, digits: int) -> dict:
    """A problem for --kd-prompts."""
    return {"messages": [{"role": "user", "content": problem_text(first, second, digits)}]}


def task(first: int, second: int, digits: int) -> dict:
    """A problem for --kd-eval-tasks: the last number of a text must be the sum."""
    return question(first, second, digits) | {"answer": str(first + second), "match": "number"}


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_problems(out: Path, train: int, held_out: int, digits: int) -> None:
    """Write the four files; no held-out problem is a training problem."""
    found = problems(train + held_out, digits, seed=1)
    for name, pairs in (("train", found[held_out:]), ("valid", found[:held_out])):
        write_lines(out / f"{name}.jsonl", (conversation(*pair, digits) for pair in pairs))
    write_lines(out / "prompts.jsonl", (question(*pair, digits) for pair in found[held_out:]))
    write_lines(out / "tasks.jsonl", (task(*pair, digits) for pair in found[:held_out]))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and a token that ends an answer."""
    vocabulary = {token: number for number, token in enumerate([START, END, UNKNOWN, *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, unk_token=UNKNOWN)
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(hidden: int, ffn: int, layers: int, heads: int, seed: int) -> LlamaForCausalLM:
    """A Llama model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS) + 3,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def write_models(out: Path, sizes: dict[str, tuple[int, int, int, int]], seeds: Sequence[int]) -> None:
    """Write the teacher and one student per seed."""
    tokenizer = make_tokenizer()
    named = [("teacher-0", "teacher", 0), *((f"student-{seed}-0", "student", seed) for seed in seeds)]
    for name, kind, seed in named:
        model = make_model(*sizes[kind], seed=seed)
        for part in (tokenizer, model):
            part.save_pretrained(out / name)
        print(f"{out / name}: {model.num_parameters():,} parameters")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sizes", choices=SIZES, default="small", help="sizes of the models (%(default)s)")
    parser.add_argument("--digits", type=int, default=3, metavar="N", help="digits of a number (%(default)s)")
    parser.add_argument("--train", type=int, default=20_000, metavar="N", help="training problems (%(default)s)")
    parser.add_argument("--held-out", type=int, default=256, metavar="N", help="held-out problems (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="students (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_problems(args.out, args.train, args.held_out, args.digits)
    logging.disable_progress_bar()
    write_models(args.out, SIZES[args.sizes], args.seeds)


if __name__ == "__main__":
    main()
