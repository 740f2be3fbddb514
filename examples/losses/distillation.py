"""The loss of a student and a teacher from Hugging Face transformers, from final hidden states and LM heads.

Used by plain_pytorch.py and hf_trainer.py in this folder; docs/losses_alone.md explains it.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkd.losses import LinearLogits, LogitMap, LossOutput, LossSpec, TokenWeights, VocabLayout, loss_from_hidden

IGNORED = -100
"""Label of a token that is not supervised."""


def logit_map(config: PretrainedConfig) -> LogitMap:
    """Scale and softcap between a model's LM head and its logits (Gemma, Cohere, Granite); none for most models."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    return LogitMap(scale / getattr(text, "logits_scaling", 1.0), getattr(text, "final_logit_softcapping", None))


def linear_logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None) -> LinearLogits:
    """A model's logits as hidden states [tokens, width] and LM head [vocabulary, width]; they are never multiplied
    here."""
    states = model.get_decoder()(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    hidden, head = states.last_hidden_state.flatten(0, 1), model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return LinearLogits(hidden, head.weight.to(hidden.dtype), logit_map(model.config), bias)


@dataclass(frozen=True)
class Distillation:
    """Cross-entropy and a divergence from a frozen teacher with the same tokenizer."""

    teacher: PreTrainedModel
    tokens: int
    """Tokens of the tokenizer. Columns of the LM heads beyond them are padding."""
    ratio: float = 0.9
    """R: the loss is (1 - R) CE + R T² KD."""
    spec: LossSpec = field(default_factory=LossSpec)

    def loss(
        self,
        student: PreTrainedModel,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        divisor: Tensor | float | None = None,
    ) -> tuple[Tensor, LossOutput]:
        """The loss of a microbatch.

        Args:
            student: the model to train.
            input_ids: [batch, length].
            labels: [batch, length], not shifted; -100 is not supervised.
            attention_mask: [batch, length]; None for rows without padding.
            divisor: supervised tokens of the whole step, see `supervised_tokens`; None: those of this microbatch.

        Returns:
            The loss, and the terms of each token.
        """
        shifted = pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()
        supervised = (shifted != IGNORED).float()
        with torch.no_grad():
            theirs = linear_logits(self.teacher, input_ids, attention_mask)
        output = loss_from_hidden(
            linear_logits(student, input_ids, attention_mask),
            theirs,
            TokenWeights(shifted, (1 - self.ratio) * supervised, self.ratio * supervised),
            spec=self.spec,
            vocab=VocabLayout(self.tokens),
        )
        return output.loss / (supervised.sum().clamp_min(1.0) if divisor is None else divisor), output


def supervised_tokens(labels: Tensor) -> Tensor:
    """Number of supervised tokens: the first label of a row is the prediction of nothing."""
    return (labels[:, 1:] != IGNORED).sum()


@torch.no_grad()
def check_logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
    """Compare hidden states times LM head with the logits that the model itself computes.

    A model whose logits are something else would be trained on a wrong loss without any other sign.

    Raises:
        ValueError: they differ.
    """
    model_logits = model(input_ids=input_ids, attention_mask=attention_mask).logits.flatten(0, 1).float()
    parts = linear_logits(model, input_ids, attention_mask)
    ours = parts.hidden.float() @ parts.weight.float().T
    ours = parts.logit_map.apply_(ours if parts.bias is None else ours + parts.bias.float())
    error = (ours - model_logits).norm() / model_logits.norm()
    if not error < (1e-4 if parts.hidden.dtype == torch.float32 else 3e-2):
        raise ValueError(
            f"the logits of {type(model).__name__} are not its final hidden states times its LM head (difference "
            f"{error:.2g}): extend logit_map in {__file__}"
        )
