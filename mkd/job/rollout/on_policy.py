"""The rows of --kd-on-policy, from the flags of a job."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mkd.checkpoint.source import EnsembleSource, TeacherSource
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import length_multiple
from mkd.config.run_state import RunState
from mkd.data.packing.row_layout import RowLayout
from mkd.data.sources.prompts import ON_POLICY, Prompt, read_prompts, require_known_tokens
from mkd.errors import MkdConfigError, MkdDataError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.memory import cache_tokens
from mkd.job.rollout.samples import Writer, text_positions
from mkd.job.rollout.servers import served_writer
from mkd.job.teachers.common import SourceAtAddresses
from mkd.rollout.engine.attention import reason_against_cache
from mkd.rollout.engine.cached import cached_length
from mkd.rollout.guard import CollapseGuard
from mkd.rollout.interface import Decoding
from mkd.rollout.on_policy import OnPolicy
from mkd.rollout.rows import WrittenRowOptions
from mkd.rollout.served.find import TextSizes
from mkd.rollout.stop_strings import StopStrings


def on_policy_of(
    args: Namespace,
    kd: KDConfig,
    true_vocab: int,
    longest: int | None,
    state: RunState | None = None,
    *,
    waits: bool = False,
    cross: CrossTokenizers | None = None,
    source: TeacherSource | None = None,
) -> OnPolicy | None:
    """The rows of --kd-on-policy; None without the flag.

    Args:
        args: Megatron's.
        kd: share, prompts and options of sampling.
        true_vocab: the student's vocabulary size.
        longest: positions of the models; None if they have those of a row.
        state: keeps the texts of --kd-rollout-steps, and the rollouts that run away; None: a state of its own.
        waits: wait for servers of --kd-rollout-url that do not answer yet.
        cross: the teachers with other tokenizers; None without any.
        source: the teachers, whose addresses are their names if they are elsewhere; None if they are unknown.

    Raises:
        MkdConfigError: answers, or the keys and values of one text, are larger than the models or the memory.
        MkdDataError: the prompts cannot be used, or nothing would end a text.
        MkdTeacherError: the servers of --kd-rollout-url cannot be used.
    """
    if not kd.is_on_policy:
        return None
    state = RunState() if state is None else state
    writer = Writer.of(args, kd.rollout_tokens, true_vocab)
    prompts = _prompts(args, kd, writer, _most_tokens(args, kd, longest))
    longest_prompt = max(len(prompt.tokens) for prompt in prompts)
    sizes = TextSizes(true_vocab, longest_prompt + kd.rollout_tokens)
    teachers = _teachers(prompts, kd, source)
    return OnPolicy(
        share=kd.on_policy_over_time,
        prompts=[prompt.tokens for prompt in prompts],
        layout=RowLayout(args.seq_length, kd.packing_multiple, kd.packing != "none", kd_everywhere=False),
        decoding=_decoding(args, kd, writer, longest_prompt),
        engine=writer.engine,
        teachers=teachers,
        samples=kd.rollout_samples,
        steps=kd.rollout_steps,
        views=None if cross is None else cross.written_views(prompts),
        options=WrittenRowOptions(kd.rollout_cut_off == "drop", kd.position_weight, is_routed=bool(teachers)),
        guard=_guard(kd, state),
        state=state,
        writer=served_writer(args, kd, sizes, waits),
    )


def _prompts(args: Namespace, kd: KDConfig, writer: Writer, length: int) -> list[Prompt]:
    """The prompts of --kd-prompts, whose texts have at most `length` tokens.

    Raises:
        MkdConfigError: an answer alone has that many.
        MkdDataError: a prompt cannot be used, or nothing would end a text.
    """
    if not writer.decoding.end_tokens:
        raise MkdDataError(
            f"{writer.flag} {args.tokenizer_model} has no end token, and every text of --kd-on-policy would be cut "
            "off: set eos_token in its tokenizer_config.json"
        )
    if kd.rollout_tokens >= length:
        raise MkdConfigError(
            f"--kd-rollout-tokens is {kd.rollout_tokens}; it must be below {length}, the positions of the models: "
            "prompt and answer are one text"
        )
    prompts = read_prompts(kd.prompts, writer.tokenizer, length - kd.rollout_tokens, ON_POLICY, writer.flag)
    require_known_tokens(prompts, writer.decoding.true_vocab)
    return prompts


def _decoding(args: Namespace, kd: KDConfig, writer: Writer, longest_prompt: int) -> Decoding:
    """How the answers are sampled, and what ends them."""
    return replace(
        writer.decoding,
        rows=args.micro_batch_size,
        temperature=kd.rollout_temperature,
        top_p=kd.rollout_top_p,
        seed=args.seed,
        cache_tokens=_cache_tokens(args, kd, longest_prompt),
        stops=None if kd.rollout_stop is None else StopStrings(tuple(kd.rollout_stop), writer.tokenizer),
    )


def _most_tokens(args: Namespace, kd: KDConfig, longest: int | None) -> int:
    """Tokens of a text at most: it does not have more positions than the models with its padding, which packed rows and
    the layout need, since these rows may be longer."""
    multiple = length_multiple(args)
    if kd.packing != "none":
        multiple = math.lcm(multiple, kd.packing_multiple)
    return text_positions(args, longest) // multiple * multiple


def _cache_tokens(args: Namespace, kd: KDConfig, longest_prompt: int) -> int | None:
    """`Decoding.cache_tokens`.

    Raises:
        MkdConfigError: one text does not fit into --kd-rollout-memory-gb, or nothing is cached.
    """
    if kd.rollout_memory_gb is None:
        return None
    what = f"--kd-rollout-memory-gb is {kd.rollout_memory_gb:g}"
    if (reason := reason_against_cache(args)) is not None:
        raise MkdConfigError(f"{what}, but no keys and values are cached ({reason}): leave it out")
    multiple = length_multiple(args)  # the texts are the tokens of a forward pass: their number is a multiple too
    tokens, length = cache_tokens(args, kd), cached_length(longest_prompt + kd.rollout_tokens, multiple) * multiple
    if tokens < length:
        least = kd.rollout_memory_gb * length / max(tokens, 1)
        texts = "the longest prompt with its answer takes" if multiple == 1 else f"{multiple} texts of the longest take"
        raise MkdConfigError(
            f"{what}, which holds keys and values of {tokens} tokens, but {texts} "
            f"{length}: give at least {least:.3g}, or lower --kd-rollout-tokens"
        )
    return tokens


def _guard(kd: KDConfig, state: RunState) -> CollapseGuard | None:
    if kd.rollout_guard == "off":
        return None
    return CollapseGuard(kd.rollout_guard == "stop", kd.rollout_most_repeated, kd.rollout_most_cut_off, state)


def _teachers(prompts: Sequence[Prompt], kd: KDConfig, source: TeacherSource | None) -> list[int]:
    """Index of the only teacher of each prompt, -1 for all; empty if no prompt names one.

    Raises:
        MkdDataError: a prompt names no teacher, or one of several; or their logits are averaged.
    """
    if all(prompt.teacher is None for prompt in prompts):
        return []
    names = _names(kd, source)
    found = []
    for prompt in prompts:
        numbers = [number for number, known in enumerate(names) if prompt.teacher in known]
        if prompt.teacher is not None and len(numbers) != 1:
            problem = "is not a teacher of this job" if not numbers else "is the name of several teachers"
            raise MkdDataError(
                f"{prompt.where}: teacher {prompt.teacher!r} {problem}: give one of "
                f"{', '.join(known[0] for known in names)}, or remove it"
            )
        if prompt.teacher is not None and kd.teachers_mode == "averaged_logits":
            raise MkdDataError(
                f"{prompt.where}: teacher {prompt.teacher!r} cannot be alone with --kd-teachers-mode averaged_logits: "
                "give sum, or remove it"
            )
        found.append(-1 if prompt.teacher is None else numbers[0])
    return found


def _names(kd: KDConfig, source: TeacherSource | None) -> list[list[str]]:
    """Names of each teacher: its folder with and without the path, or its addresses."""
    if kd.teacher_url is None:
        return [[folder, Path(folder).name] for folder in kd.teacher_hf or [kd.teacher_load]]
    if source is None:
        return [kd.teacher_url]
    sources = source.sources if isinstance(source, EnsembleSource) else (source,)
    return [list(map(str, one.addresses)) for one in sources if isinstance(one, SourceAtAddresses)]
