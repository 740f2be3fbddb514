"""Importance of a teacher's channels and heads, from its weights or from its activations on sample text."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.prune.width import Importance, axis_parts
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.data_files import FileFormat, data_files
from mkd.data.sources.record_forms import is_conversation
from mkd.data.sources.text import decode, json_object, read_batches, require_unicode
from mkd.errors import MkdConfigError, MkdDataError
from mkd.utils.model_folders.chat_template import apply_chat_template
from mkd.utils.model_folders.pretrained import load_model, load_tokenizer


def magnitude_importance(folder: HFFolder, family: Family, args: dict[str, Any]) -> Importance:
    """Importance from weights: mean |weight|, summed over all matrices in which a channel or head has rows or columns.

    The weights of a key and a value head count for every query head of their group. Norms and biases are ignored. Only
    a few thousand rows of one matrix are in memory at a time.

    Raises:
        MkdCheckpointError: a weight is not finite.
    """
    dims = family.dims(args)
    scores = Importance.zeros(dims, args["num_layers"])

    def add(part: str, layer: int | None, values: Tensor) -> None:
        if part == "hidden":
            scores.hidden.add_(values)
        elif part == "ffn":
            scores.ffn[layer] += values
        elif part in ("query", "key"):
            blocks = values.unflatten(0, (-1, dims.head_dim)).mean(1)
            scores.heads[layer] += blocks.repeat_interleave(dims.heads // len(blocks))

    for item in family.tensors(args):
        for name, axes in zip(item.shapes, item.entry.sources.values(), strict=True):
            if len(axes) != 2 or name not in folder.tensors:
                continue
            for axis, values in zip(axes, _mean_magnitudes(folder, name), strict=True):
                parts = axis_parts(axis)
                for part, piece in zip(parts, values.split([getattr(dims, part) for part in parts]), strict=True):
                    add(part, item.layer, piece)
    if not scores.is_finite:
        raise folder.error("there are weights that are not finite")
    return scores


def _mean_magnitudes(folder: HFFolder, name: str) -> tuple[Tensor, Tensor]:
    """Mean |weight| of each row and of each column of a matrix, float64 with fp32 precision."""
    rows, cols = folder.tensors[name][0]
    row_means, col_sums = [], torch.zeros(cols, dtype=torch.float64)
    for block_rows in folder.row_blocks(name):
        block = folder.read(name, block_rows).float().abs_()
        row_means.append(block.mean(1).double())  # summing in float64 takes several times as long
        col_sums += block.sum(0).double()
    return torch.cat(row_means), col_sums / rows


@torch.no_grad()
def activation_importance(
    folder: HFFolder, family: Family, args: dict[str, Any], samples: Sequence[Tensor], device: str = "cpu"
) -> Importance:
    """Importance from activations, averaged over tokens, as in Minitron (Muralidharan et al. 2024, section 2.2).

    Hidden channel: mean |output| of every norm, summed over the norms. FFN channel: mean |input| of the layer's down
    projection. Head: mean 2-norm of its output, before the output projection. transformers runs the model in the
    folder's dtype.

    Args:
        folder, family, args: the teacher.
        samples: int64 token ids, [n] per sample.
        device: device string of torch; the whole model must fit.

    Raises:
        MkdConfigError: there is no such device.
        MkdCheckpointError: an activation is not finite.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MkdConfigError(f"--device {device} cannot be used: {error}") from error
    whole = folder.vision_language
    model = load_model(folder.path, folder.flag, whole is not None, dtype="auto").eval().to(device)
    dims = family.dims(args)
    scores = Importance.zeros(dims, args["num_layers"])
    for item in family.tensors(args):
        for name, axes in zip(item.shapes, item.entry.sources.values(), strict=True):
            module = model.get_submodule((name if whole is None else whole.module_name(name)).rpartition(".")[0])
            if axes == ("hidden",) and name.endswith(".weight"):
                module.register_forward_hook(_add_sizes(scores.hidden, use_output=True))
            elif axes == ("hidden", "ffn"):
                module.register_forward_hook(_add_sizes(scores.ffn[item.layer]))
            elif axes == ("hidden", "query"):
                module.register_forward_hook(_add_sizes(scores.heads[item.layer], width=dims.head_dim))
    language_model = model if whole is None else whole.language_model(model)
    for sample in samples:
        language_model.base_model(sample[None].to(device), use_cache=False)
    tokens = sum(len(sample) for sample in samples)
    for total in (scores.hidden, scores.ffn, scores.heads):
        total /= tokens
    if not scores.is_finite:
        raise folder.error("there are activations that are not finite on --data")
    return scores


def _add_sizes(total: Tensor, width: int = 1, use_output: bool = False) -> Callable[..., None]:
    """A forward hook that adds the 2-norm of each block of `width` channels, summed over tokens, to `total`.

    It measures the module's input, or its output with `use_output`.
    """

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values = (output if use_output else inputs[0]).flatten(0, -2).float().unflatten(-1, (-1, width))
        total.add_(torch.linalg.vector_norm(values, dim=-1).sum(0, dtype=torch.float64).cpu())

    return hook


def read_samples(folder: HFFolder, data: Path, count: int, length: int) -> list[Tensor]:
    """Token ids of the first `count` records of a file, each truncated to `length` tokens.

    A record holds `{"text": ...}`, or a conversation as in training data, which is rendered by the tokenizer's chat
    template.

    Returns:
        One int64 tensor [n] per line, n from 1 to `length`.

    Raises:
        MkdConfigError: `count` or `length` is below 1.
        MkdDataError: the file is missing, a line has another format (the message names it), the file has no tokens, or
            the folder has no tokenizer or one with more tokens than the model.
    """
    for flag, value in (("--samples", count), ("--seq-length", length)):
        if value < 1:
            raise MkdConfigError(f"{flag} is {value}; it must be at least 1")
    has_suffix = FileFormat.of(str(data)) is not None or not data.is_file()
    files = data_files(str(data), "--data") if has_suffix else [str(data)]
    tokenizer = load_tokenizer(str(folder.path), folder.flag)
    vocab = folder.config["vocab_size"]
    samples: list[Tensor] = []
    for where, line in _records(files):
        if ids := _encode(tokenizer, line, where)[:length]:
            if max(ids) >= vocab:
                raise MkdDataError(f"{where}: the tokenizer gives id {max(ids)}, the model's vocab_size is {vocab}")
            samples.append(torch.tensor(ids))
        if len(samples) == count:
            break
    if not samples:
        raise MkdDataError(f"--data {data} has no text")
    return samples


def _records(files: list[str]) -> Iterator[tuple[str, bytes]]:
    """(position for messages, JSON) of the records; blank lines are left out."""
    for batch in read_batches(files):
        for where, line in batch.located():
            if line.strip():
                yield f"--data {where}", line


def _encode(tokenizer: PreTrainedTokenizerBase, line: bytes, where: str) -> list[int]:
    record = json_object(decode(line, where), where)
    if "text" in record:
        if not isinstance(record["text"], str):
            raise MkdDataError(f"{where}: text is a {type(record['text']).__name__}, not a string")
        require_unicode(record["text"], where)
        return tokenizer(record["text"], verbose=False)["input_ids"]
    if not is_conversation(record):
        keys = ", ".join(sorted(record)) or "none"
        raise MkdDataError(f"{where}: neither text nor messages nor prompt and completion (keys there: {keys})")
    chat = Conversation.parse(line, where)
    try:
        text = apply_chat_template(tokenizer, chat.messages, tools=chat.tools, tokenize=False)
    except Exception as error:  # no template, or any error inside the template
        raise MkdDataError(f"{where}: the tokenizer's chat template refuses the conversation: {error}") from error
    require_unicode(text, where)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
