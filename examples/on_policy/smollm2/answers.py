"""Let a model answer questions: one JSON line per answer, a conversation with its token ids.

    python examples/on_policy/smollm2/answers.py --hf TEACHER --questions train.questions.jsonl --out answers.jsonl

The questions are conversations without an answer; the chat template of the model renders them with a generation prompt.
Tokens are sampled from the whole vocabulary at --temperature; 0 takes the most probable one. It uses a GPU if any.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mkd.errors import MkdDataError, MkdError
from mkd.utils.atomic_files import replacing
from mkd.utils.model_folders.hub_folder import model_folder
from mkd.utils.model_folders.pretrained import load_model, load_tokenizer

Messages = list[dict[str, str]]


def load(folder: str, flag: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of the Hugging Face folder that a flag names, on the GPU if there is one."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(folder, flag)
    model = load_model(model_folder(folder, flag), flag, dtype=dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def read_questions(path: str) -> list[Messages]:
    """Conversations of a file.

    Raises:
        MkdDataError: a line has no messages.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line).get("messages") for line in lines]
    if not found or not all(found):
        raise MkdDataError(f"--questions {path} has a line without messages: write it with make_questions.py")
    return found


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Token ids of a conversation with a generation prompt."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def answer_tokens(
    model: PreTrainedModel, prompts: Sequence[list[int]], tokens: int, temperature: float, end: int
) -> list[list[int]]:
    """Token ids of one answer per prompt, with the end token if the answer has ended."""
    longest = max(map(len, prompts))
    rows = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    written = model.generate(
        input_ids=rows, attention_mask=mask, max_new_tokens=tokens, eos_token_id=end, pad_token_id=end,
        **({"do_sample": False} | sampling),
    )  # fmt: skip
    answers = written[:, longest:].tolist()
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def answers(args: argparse.Namespace) -> Iterator[dict]:
    """One record per question and sample, batches of similar length first to last."""
    model, tokenizer = load(args.hf, "--hf", torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    end = tokenizer.eos_token_id
    asked = [(messages, prompt_tokens(tokenizer, messages)) for messages in read_questions(args.questions)]
    asked = sorted(asked * args.samples, key=lambda question: len(question[1]))
    torch.manual_seed(args.seed)
    for start in range(0, len(asked), args.batch):
        batch = asked[start : start + args.batch]
        written = answer_tokens(model, [prompt for _, prompt in batch], args.tokens, args.temperature, end)
        for (messages, prompt), found in zip(batch, written, strict=True):
            ended = found[-1] == end
            text = tokenizer.decode(found[:-1] if ended else found)
            yield {
                "messages": [*messages, {"role": "assistant", "content": text}],
                "prompt_tokens": prompt,
                "answer_tokens": found,
                "ended": ended,
            }


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, metavar="DIR", help="model that answers")
    parser.add_argument("--questions", required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (%(default)s)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers to each question (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="answers at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the sampling (%(default)s)")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        found = list(answers(args))
    except MkdError as error:
        print(f"answers: {error}", file=sys.stderr)
        return 1
    ended = sum(record["ended"] for record in found)
    with replacing(args.out) as file:  # run.sh keeps answers that are there already: they must be whole
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in found)
    print(f"{args.out}: {len(found)} answers in {time.monotonic() - began:.0f} s, {ended / len(found):.0%} ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
