"""Intermediate-layer distillation: the student's hidden states after some layers are pulled toward the teacher's.

The loss on the last pipeline stage has no access to the outputs of earlier layers, so the term enters where it arises:
a hook on the student's layer adds the term's gradient to the gradient that comes back through the layer's output. The
sum is the same as if the term were part of the loss (docs/losses.md, "Intermediate layers").
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from mkd.config.values import HiddenLossType, LayerPair
from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups
from mkd.losses.hidden import hidden_loss
from mkd.models.layer_maps import add_maps, name_of_map, new_map
from mkd.models.parameter_sync import finish_parameter_sync
from mkd.teacher.layer_outputs import LayerRecorder, LayerRoute, deliver


@dataclass
class LayersOfMicrobatch:
    """The targets of the student's layers in one microbatch, and the sum of the distances on this rank."""

    owner: "HiddenLayers"
    mask: Tensor
    """[N] fp32, 1 for the tokens of this rank's hidden states that take part."""
    scale: Tensor
    """Scalar factor of the sum over tokens and pairs: R * W * `StepTokens.kd_scale`."""
    evaluating: bool
    compares: bool
    """False in a training step at R = 0, where the teacher does not run."""
    targets: dict[LayerPair, Tensor] = field(default_factory=dict)
    """The teacher's hidden states of every pair on this stage, each until it has been used; filled by `begin` where the
    teacher runs per microbatch."""
    total: Tensor | float = 0.0
    """Sum over this rank's tokens and pairs of the distance, without R * W."""

    def begin(self) -> None:
        """Make this the microbatch of the student's next forward pass; the teacher's forward pass is done."""
        self.owner._begin(self)


class HiddenLayers:
    """The pairs of layers, their maps and hooks in the student, and the state of a step."""

    def __init__(
        self,
        pairs: Sequence[LayerPair],
        kind: HiddenLossType,
        weight: float,
        groups: Groups,
        teacher: LayerRecorder,
        seed: int,
    ) -> None:
        """Nothing is placed in the student before `attach`.

        Args:
            pairs: layers that both models have.
            kind: the distance.
            weight: W.
            groups: the layout of both models.
            teacher: records the pairs' teacher layers on this stage.
            seed: initializes the maps, together with nothing but the pair.
        """
        self._pairs, self._kind, self._weight = tuple(pairs), kind, weight
        self._groups, self._teacher, self._seed = groups, teacher, seed
        self._config: Any = None
        self._here: tuple[LayerPair, ...] = ()
        self._routes: list[LayerRoute] = []
        self._current: LayersOfMicrobatch | None = None
        self._is_paused = False
        self._recomputed: dict[LayerPair, deque[LayersOfMicrobatch]] = {}

    def attach(self, chunks: list[GPTModel]) -> list[GPTModel]:
        """Place hooks, and maps where widths differ, in the student's model chunks, before they are wrapped.

        Collective over the pipeline ranks.
        """
        self._config = chunks[0].config
        for chunk in chunks:
            maps = nn.ModuleDict()
            for layer in chunk.decoder.layers:
                for pair in (pair for pair in self._pairs if pair.student == layer.layer_number):
                    projection = None
                    if self._config.hidden_size != self._teacher.shape.width:
                        projection = new_map(pair, self._config, self._teacher.shape.width, self._seed)
                        maps[name_of_map(pair)] = projection
                    layer.register_forward_hook(partial(self._after_layer, pair, projection))
                    self._here += (pair,)
            add_maps(chunk, maps)
        self._recomputed = {pair: deque() for pair in self._here}
        self._routes = self._find_routes()
        return chunks

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the `with` block the student runs on texts that the teacher does not read."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _find_routes(self) -> list[LayerRoute]:
        """Routes from the stage with the teacher's layer of each pair to the stage with the student's."""
        pp = self._groups.pp
        everywhere: list = [(self._here, self._teacher.layers)] * pp.size()
        if pp.size() > 1:
            dist.all_gather_object(everywhere, (self._here, self._teacher.layers), group=pp)
        source = {layer: stage for stage, (_, layers) in enumerate(everywhere) for layer in layers}
        return sorted(
            {
                LayerRoute(pair.teacher, source[pair.teacher], stage)
                for stage, (pairs, _) in enumerate(everywhere)
                for pair in pairs
            }
        )

    def microbatches(
        self, batches: Sequence[KDBatch], ratio: float, evaluating: bool, teacher_is_done: bool, kd_scale: Tensor
    ) -> list[LayersOfMicrobatch]:
        """The layers of each microbatch of a step. Collective over the pipeline ranks.

        Args:
            batches: the step's microbatches.
            ratio: R.
            evaluating: compute the distances at any R.
            teacher_is_done: the teacher has run on all of them; otherwise it runs in each microbatch's forward step.
            kd_scale: `StepTokens.kd_scale` of the step.
        """
        recorded = self._teacher.take()
        for waiting in self._recomputed.values():
            waiting.clear()  # left by a step that raised
        compares = evaluating or ratio > 0.0
        scale = ratio * self._weight * kd_scale
        step = [
            LayersOfMicrobatch(self, self._local_tokens(batch.kd_mask), scale, evaluating, compares)
            for batch in batches
        ]
        if compares and teacher_is_done:
            sizes = [tuple(batch.tokens.shape) for batch in batches]
            wanted = deliver(recorded, self._routes, self._groups.pp, self._teacher.shape, sizes)
            for number, microbatch in enumerate(step):
                microbatch.targets = {pair: wanted[pair.teacher][number] for pair in self._here}
        return step

    def _local_tokens(self, mask: Tensor) -> Tensor:
        """[b, s] -> [N] in the order of this rank's hidden states [s, b, H] or [s/tp, b, H]."""
        tokens = mask.t()
        if self._config.sequence_parallel:
            tokens = tokens.chunk(self._groups.tp.size())[self._groups.tp.rank()]
        return tokens.reshape(-1)

    def _begin(self, microbatch: LayersOfMicrobatch) -> None:
        self._current = microbatch
        # Outputs of a teacher that runs per microbatch; otherwise all were taken when the step began.
        for layer, outputs in self._teacher.take().items():
            microbatch.targets |= {pair: outputs[0] for pair in self._here if pair.teacher == layer and outputs}

    def _after_layer(
        self, pair: LayerPair, projection: nn.Linear | None, layer: nn.Module, inputs: tuple, output: tuple
    ) -> tuple | None:
        """Forward hook: the layer's output, with the term's gradient attached where gradients are taken."""
        if self._is_paused:
            return None
        hidden, *rest = output
        trains, waiting = torch.is_grad_enabled(), self._recomputed[pair]
        # Where activations are recomputed, the layer runs a first time without gradients, and again in the backward
        # pass. Backward passes go through a chunk in the order of its forward passes.
        again = trains and len(waiting) > 0
        microbatch = waiting.popleft() if again else self._current
        last = trains or microbatch.evaluating
        if not last:
            waiting.append(microbatch)
        if not microbatch.compares:
            # The map still takes part: otherwise data-parallel communication would wait for its gradient.
            loss = None if projection is None else projection.weight[:0].float().sum()
        else:
            target = microbatch.targets.pop(pair) if last else microbatch.targets[pair]
            loss, value = self._loss(microbatch, projection, hidden, target)
            if not again:
                microbatch.total = microbatch.total + value
        if not trains or loss is None:
            return None
        return _attach(hidden, loss, self._config.grad_scale_func), *rest

    def _loss(
        self, microbatch: LayersOfMicrobatch, projection: nn.Linear | None, hidden: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The term of one pair, and the sum of its distances without R * W."""
        if projection is not None:
            finish_parameter_sync(projection)
        # A weight of 0 removes a token, so an evaluation at R = 0 must not weigh with R.
        scale = 1.0 if microbatch.evaluating else microbatch.scale
        loss, values = hidden_loss(
            hidden.flatten(0, 1),
            None if projection is None else projection.weight,
            target.flatten(0, 1),
            scale * microbatch.mask,
            self._kind,
        )
        return loss, (values * microbatch.mask).sum()

    def add_to(self, reports: Sequence[dict[str, Tensor]], step: Sequence[LayersOfMicrobatch]) -> None:
        """Add `hidden` ([sum, count], like the other means) to the last stage's reports, and the term to their `loss`.

        Collective over the tensor- and pipeline-parallel ranks: one all-reduce of 4 bytes per microbatch.
        """
        if not step[0].compares:
            return
        sums = torch.stack([torch.as_tensor(m.total, dtype=torch.float32, device=m.mask.device) for m in step])
        if self._groups.tp.rank() > 0 and not self._config.sequence_parallel:
            sums = torch.zeros_like(sums)  # the same tokens as on rank 0
        dist.all_reduce(sums, group=self._groups.mp)
        for report, microbatch, value in zip(reports, step, sums, strict=len(reports) > 0):
            total, count = report["loss"]
            report["loss"] = torch.stack([total + microbatch.scale * value, count])
            report["hidden"] = torch.stack([value, report["kd"][1]])


def _attach(hidden: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
    """`hidden`, whose backward pass also backpropagates `loss`, times mixed precision's loss scale.

    With --calculate-per-token-loss Megatron multiplies the loss of the last stage by nothing else.
    """
    # A stage's output must not be a view: Megatron's schedules free its storage.
    return make_viewless_tensor(_Attach.apply(hidden, loss, scale), requires_grad=True, keep_graph=True)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.scale = scale
        ctx.one = torch.ones(1, dtype=loss.dtype, device=loss.device)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.one if ctx.scale is None else ctx.scale(ctx.one)
        return upstream, scale.reshape(()), None
