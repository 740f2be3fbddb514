"""A model of vLLM whose hidden states are extracted, beside the log-probabilities of a few texts to check them."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mkd.errors import MkdTeacherError
from mkd.teacher.inference.apis import VllmApi, require_same_text, scores_in, send, wrong_form
from mkd.teacher.inference.http import ServerLost
from mkd.teacher.inference.output_layer import OutputLayer
from mkd.teacher.inference.pool import ServedModel
from mkd.teacher.inference.scores import TokenScores
from mkd.teacher.inference.states_files import FLAG, StatesFolder

HEAD_FLAG = "--kd-teacher-head-hf"
TOP_K = 4
"""Most probable tokens by which states are compared with log-probabilities; vLLM allows 20 without a flag."""
_MOST_POSITIONS = 32
"""Positions of a text at which they are compared."""
_ROUNDING_NATS, _ROUNDING_SHARE = 0.1, 5e-3
"""Mean difference up to which states belong to log-probabilities: servers round logits to bf16, by up to 0.4%."""


@dataclass(frozen=True)
class StatesModel(ServedModel):
    """A model whose answers name files of hidden states, one layer's: those before the final norm."""

    folder: StatesFolder
    output: OutputLayer

    def states(self, text: Sequence[int]) -> Tensor:
        """[n, H] states of all tokens of a text, before the final norm, in the server's dtype.

        Raises:
            ServerLost: the server does not answer now, or its file does not come.
            MkdTeacherError, MkdNumericError: its answer cannot be used.
        """
        body = {**VllmApi().body(self.name, text, TOP_K)}
        del body["prompt_logprobs"]
        return self._request(body, text, 1)[1]

    def score(self, text: Sequence[int], top_k: int, vocab: int) -> TokenScores:
        """The scores of a text, which its hidden states give too; see `mkd.teacher.inference.apis.score`."""
        answer, states = self._request(VllmApi().body(self.name, text, top_k), text, top_k + 2)
        scores = scores_in(answer, self.api, self.server, text, top_k, vocab)
        self._compare(scores, states)
        return scores

    def remedy(self, top_k: int, tokens: int, length: int) -> str:
        """See `ServedModel`."""
        return f"For texts of {tokens} tokens start the server with {self.command(length)}"

    def command(self, length: int) -> str:
        """The command that starts a server for texts of `length` tokens."""
        layer = {"eagle_aux_hidden_state_layer_ids": [self.output.layers]}
        extracting = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layer},
        }
        writing = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder.folder.absolute())},
        }
        return (
            f"vllm serve {self.output.folder.path} --max-model-len {length} --speculative-config "
            f"'{json.dumps(extracting)}' --kv-transfer-config '{json.dumps(writing)}'"
        )

    def _request(self, body: dict[str, Any], text: Sequence[int], entries: int) -> tuple[Any, Tensor]:
        request = f"mkd-{uuid.uuid4().hex}"
        try:
            answer = send(self.api, self.server, {**body, "request_id": request}, entries * len(text))
        except ServerLost:
            self.folder.give_up(request)
            raise
        with wrong_form(self.api, self.server):
            (choice,) = answer["choices"]
            require_same_text(choice["prompt_token_ids"], text)
            parameters = answer.get("kv_transfer_params") or {}
            named = parameters.get("hidden_states_path")
        if named is None:
            raise MkdTeacherError(
                f"{self.server} answers without hidden states ({FLAG} {self.folder.folder}): start it with "
                f"{self.command(len(text) + 2)}"
            )
        return answer, self.folder.take(named, request, text, self.output.width, str(self.server))

    def _compare(self, scores: TokenScores, states: Tensor) -> None:
        """Refuse states that do not give the server's log-probabilities."""
        chosen = torch.linspace(0, len(scores.top_ids) - 1, min(_MOST_POSITIONS, len(scores.top_ids))).long()
        ids, log_probs = (torch.from_numpy(one)[chosen] for one in (scores.top_ids, scores.top_log_probs))
        ratios, largest = self.output.log_ratios(states[chosen], ids)
        distance = float((ratios - (log_probs - log_probs[:, :1])).abs().mean())
        if not distance <= _ROUNDING_NATS + _ROUNDING_SHARE * largest:
            raise MkdTeacherError(
                f"{self.server} writes hidden states to {FLAG} that do not give its own log-probabilities with the "
                f"final norm and the LM head of {HEAD_FLAG} {self.output.folder.path} (they differ by {distance:.3g} "
                "nats on average): they are of another layer, or another model is served; start it with "
                f"{self.command(len(states) + 2)}"
            )
