"""Command lines with one to three random flags: they train finite numbers, or are refused in one line."""

import math
import random
from argparse import Action, ArgumentParser
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from mkd.config.flags import add_kd_flags
from tests.chaos.fuzz import COMMANDS, Fuzz
from tests.chaos.lab import Lab, Outcome
from tests.chaos.sandbox import Ended, run
from tests.chaos.verdicts import EQUAL, OTHER, SILENT, Verdict, failure, metrics, refusal

LIMIT_S = 30.0
WORDS = [
    "",
    "x",
    "0",
    "-1",
    "7",
    "nan",
    "../..",
    "/",
    "/dev/null",
    "student",
    "chats.jsonl",
    "nowhere",
    "a" * 5000,
    "🙂",
    "\n",
]
INTEGERS = ["0", "1", "2", "3", "-1", "7", "1000000", "999999999999", str(2**63), str(10**30), "1.5", "x", "", "1e3"]
FLOATS = ["0", "1", "-1", "0.5", "1e-300", "1e300", "1e38", "nan", "inf", "-inf", "1e-8", "20", "10000", "x", ""]
LEFT_OUT = {
    "--help",
    "--exit-interval",  # ends each case after two steps
    "--exit-duration-in-mins",
    "--log-interval",
    "--kd-metrics-file",
}
_COMMON = (
    "lr min_lr train_iters train_samples seq_length micro_batch_size global_batch_size weight_decay adam_beta1"
    " adam_beta2 adam_eps clip_grad seed num_workers eval_iters eval_interval save_interval lr_decay_iters"
    " lr_warmup_iters lr_warmup_fraction lr_decay_style attention_dropout hidden_dropout init_method_std split"
    " data_path bf16 fp16 tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"
    " expert_model_parallel_size recompute_granularity recompute_num_layers optimizer loss_scale tokenizer_model"
    " tokenizer_type rotary_base save load num_layers hidden_size num_attention_heads ffn_hidden_size"
    " max_position_embeddings make_vocab_size_divisible_by"
)
COMMON = frozenset(_COMMON.split())


class RandomFlags:
    """A third of the flags are mkd's own, a third common ones, a third any of Megatron's."""

    name = "flags"
    cases = 600

    def __init__(self, lab: Lab, fuzz: Fuzz) -> None:
        self.lab, self.fuzz = lab, fuzz
        parser = add_kd_flags(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        actions = [a for a in parser._actions if a.option_strings and a.option_strings[0] not in LEFT_OUT]
        own = [action for action in actions if action.dest.startswith("kd_")]
        common = [action for action in actions if action.dest in COMMON]
        self._pools = {"mkd's flags": own, "common flags": common, "Megatron's flags": actions}

    def case(self, number: int) -> Outcome:
        draw = self.lab.random(self.name, number)
        group = list(self._pools)[number % len(self._pools)]
        words: list[str] = []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            words += flag_words(draw.choice(self._pools[group]), draw)
        name = draw.choice(["documents", "documents", "chats"])
        expected = self.fuzz.expected(name)["metrics"]
        self.fuzz.restore()
        ended = run(
            [*COMMANDS[name].words, "--exit-interval", "2", *words], self.fuzz.streams, LIMIT_S, cwd=self.fuzz.work
        )
        case = " ".join(word if len(word) < 60 else word[:20] + "..." for word in words).replace("\n", "\\n")
        return Outcome(group, case, self._judge(ended, expected))

    def _judge(self, ended: Ended, expected: list[dict[str, Any]]) -> Verdict:
        if (verdict := failure(ended)) is not None:
            return verdict
        if ended.status != 0:
            return refusal(ended)
        lines = metrics(self.fuzz.work / "m.jsonl")
        numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
        if not all(map(math.isfinite, numbers)):
            return Verdict(SILENT, "status 0, and a number in the metrics is not finite")
        if any("broken" in line for line in lines):
            return Verdict(SILENT, "status 0, and a line of the metrics is broken")
        if lines == expected:
            return Verdict(EQUAL)
        return Verdict(OTHER, "other flags" if lines else "no training was asked for")


def flag_words(action: Action, draw: random.Random) -> list[str]:
    """A flag with a random value of its type, of its choices, or of none of both."""
    flag = draw.choice(action.option_strings)
    if action.nargs == 0:
        return [flag] if draw.random() < 0.9 else [flag, "1"]
    count = 1 if action.nargs in (None, "?") else draw.choice([1, 2, 3])
    return [flag, *(_value(action, draw) for _ in range(count))]


def _value(action: Action, draw: random.Random) -> str:
    if action.choices and draw.random() < 0.8:
        return str(draw.choice(list(action.choices)))
    kind = getattr(action.type, "__name__", "")
    pool = {"int": INTEGERS, "float": FLOATS}.get(kind, WORDS + INTEGERS + FLOATS)
    return draw.choice(pool if draw.random() < 0.9 else WORDS)
