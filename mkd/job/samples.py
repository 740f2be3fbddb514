"""The samples of a job (--kd-sample-prompts): prompts from its flags, texts from its student."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from mkd.config.kd_config import KDConfig
from mkd.config.megatron_checks import length_multiple
from mkd.data.sources.prompts import Prompt, end_tokens, read_prompts
from mkd.distributed.groups import Groups
from mkd.report.samples import Sample
from mkd.train.greedy import Decoding, write_greedy
from mkd.utils.json_files import read_json
from mkd.utils.pretrained import load_tokenizer


@dataclass(frozen=True)
class SampleWriter:
    """Lets the student continue the prompts."""

    prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    decoding: Decoding

    @classmethod
    def of(cls, args: Namespace, kd: KDConfig, true_vocab: int) -> "SampleWriter | None":
        """The writer of --kd-sample-prompts; None without the flag.

        Raises:
            MkdDataError: the file cannot be used.
        """
        if kd.sample_prompts is None:
            return None
        tokenizer = load_tokenizer(args.tokenizer_model)
        return cls(
            read_prompts(kd.sample_prompts, tokenizer, args.seq_length - kd.sample_tokens),
            tokenizer,
            Decoding(
                tokens=kd.sample_tokens,
                end_tokens=end_tokens(tokenizer, _generation_config(Path(args.tokenizer_model))),
                true_vocab=true_vocab,
                rows=args.eval_micro_batch_size,
                longest=args.seq_length,
                length_multiple=length_multiple(args),
            ),
        )

    def write(self, chunks: Sequence[nn.Module], groups: Groups) -> list[Sample]:
        """One sample per prompt, the same on all ranks. Collective over all ranks."""
        written = write_greedy(chunks, groups, [prompt.tokens for prompt in self.prompts], self.decoding)
        samples = []
        for prompt, tokens in zip(self.prompts, written, strict=True):
            ended = tokens[-1] in self.decoding.end_tokens
            text = self.tokenizer.decode(tokens[: len(tokens) - ended])
            samples.append(Sample(prompt.text, text, len(tokens), ended))
        return samples


def _generation_config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / "generation_config.json")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
