"""A stand-in for vLLM and SGLang on a loopback port: their documented routes and answers, and faults on demand."""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkd.checkpoint.safetensors_files import write_tensors

LogProbs = Callable[[Sequence[int]], np.ndarray]
"""Token ids [n] -> log-probabilities of the next token [n, V]."""


def table_model(vocab: int, seed: int = 0) -> LogProbs:
    """A model whose logits depend on the last two tokens and the position."""
    tables = np.random.default_rng(seed).normal(size=(3, vocab, vocab)) * 2

    def log_probs(ids: Sequence[int]) -> np.ndarray:
        ids = np.asarray(ids)
        logits = tables[0][ids] + tables[1][np.concatenate([[0], ids[:-1]])] + tables[2][np.arange(len(ids)) % vocab]
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return log_probs


States = Callable[[Sequence[int]], torch.Tensor]
"""Token ids [n] -> states before the final norm [n, H]."""


class HFStates:
    """States and log-probabilities of a transformers model, for several threads."""

    def __init__(self, model: Any) -> None:
        self._model, self._lock = model, threading.Lock()

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> torch.Tensor:
        """[n, H] before the final norm, as vLLM extracts them."""
        kept: list[torch.Tensor] = []
        with self._lock:  # the hook would see the texts of other threads
            hook = self._model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
            self._model.model(torch.tensor([list(ids)]))
            hook.remove()
        return kept[0][0].clone()

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> np.ndarray:
        """[n, V]"""
        with self._lock:
            return self._model(torch.tensor([list(ids)])).logits[0].log_softmax(-1).double().numpy()


_LOADING = {"/collective_rpc": "vllm", "/update_weights_from_disk": "sglang"}
"""Route for new weights -> the server that has it."""


class StandIn:
    """A server in threads of this process."""

    def __init__(
        self,
        model: LogProbs,
        api: str = "vllm",
        *,
        vocab: int,
        port: int = 0,
        name: str = "t",
        max_logprobs: int = 20,
        max_model_len: int = 64,
        states: States | None = None,
        states_dir: Path | None = None,
    ) -> None:
        self.model, self.api, self.vocab, self.name = model, api, vocab, name
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.states, self.states_dir = states, states_dir
        """With a folder, files of these states are written there, as vLLM's ExampleHiddenStatesConnector does."""
        self.files_named = self.files_written = 0
        """Files of states in answers, and those that are written, or never will be."""
        self.locks: list[Any] = []
        """Locks that are kept."""
        self.fault = ""
        self.late_fault: tuple[int, str] | None = None
        """Number of texts after which a fault begins, and the fault."""
        self.delay_s = 0.0
        self.busy = self.most_busy = 0
        """Requests that wait at present, and at most so far; close enough without a lock."""
        self.tokens: list[int] | None = None
        """The answer of /tokenize; None: there is no such route."""
        self.texts: list[list[int]] = []
        """Texts that were scored."""
        self.load: Callable[[str], LogProbs] | None = None
        """The model in a folder; None: there is no route for new weights."""
        self.loaded: list[str] = []
        """Folders whose weights were loaded."""
        self.written: list[tuple[list[int], list[int]]] = []
        """Prompts, with what was written after them."""
        self.bodies: list[dict[str, Any]] = []
        """Requests for texts."""
        self.seen_headers: dict[str, str] = {}
        outer = self

        class Handler(_Handler):
            server_of = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it as if it were killed: open connections fail."""
        self.fault = "dead"
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def scores(self, ids: list[int], top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """([n - 1, K] ids, [n - 1, K] log-probabilities, [n - 1] own) of the tokens after the first."""
        found = self.model(ids)[:-1]
        if self.fault == "unsteady":
            noisy = found + np.random.default_rng().normal(size=found.shape)
            found = noisy - np.log(np.exp(noisy).sum(axis=1, keepdims=True))
        top = np.argsort(-found, axis=1, kind="stable")[:, :top_k]
        return top, np.take_along_axis(found, top, 1), found[np.arange(len(found)), ids[1:]]


class StatesFile:
    """The file of an answer: its lock is held from before the answer until it is written, after the answer."""

    def __init__(self, server: StandIn, name: str, ids: list[int]) -> None:
        self._server, self._ids, self._fault = server, ids, server.fault
        self._path = server.states_dir / name
        self._lock = self._path.with_name(f"{name}.lock")
        self.named = {
            "outside": "/etc/passwd",
            "parent": f"../{name.removesuffix('.safetensors')}",
            "no name": 7,
        }.get(self._fault, f"/another/mount/{name}")
        """The path in the answer; the server may have the folder at another place."""
        server.files_named += 1

    def __enter__(self) -> "StatesFile":
        if self._fault in ("no lock", "other folder"):
            return self
        if self._fault == "lock is a link":
            self._lock.symlink_to(self._path.parent / "elsewhere")
            return self
        self._open = self._lock.open("w")
        fcntl.flock(self._open, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fault not in ("other folder", "not written"):
            self._write()
        if self._fault == "locked":
            self._server.locks.append(self._open)
        elif self._fault not in ("no lock", "other folder", "lock is a link"):
            self._open.close()
        self._server.files_written += 1

    def _write(self) -> None:
        ids, path, fault = self._ids, self._path, self._fault
        states, tokens = self._server.states(ids)[:, None], torch.tensor(ids)
        match fault:
            case "two layers":
                states = torch.cat([states, states], dim=1)
            case "narrow":
                states = states[..., :-1]
            case "fp64":
                states, tokens = states[:1].double(), tokens
            case "NaN states":
                states[-1, 0, -1] = torch.nan
            case "zeros":
                states[-1] = 0.0
            case "hole":
                states[len(ids) // 2] = 0.0
            case "zeros at first":
                states[:2] = 0.0
            case "another text":
                tokens = tokens + 1
            case "short":
                states, tokens = states[:-1], tokens[:-1]
            case "other layer":
                states = states.flip(2)
        written = path.with_name("kept") if fault == "link" else path
        if fault == "pipe":
            os.mkfifo(path)
            return
        extra = {"more": tokens} if fault == "more tensors" else {}
        write_tensors(written, {"hidden_states": states.contiguous(), "token_ids": tokens, **extra})
        if fault == "link":
            path.symlink_to(written)
        content = written.read_bytes()
        match fault:
            case "half file":
                written.write_bytes(content[: len(content) // 2])
            case "nothing":
                written.write_bytes(b"")
            case "header":
                written.write_bytes(content.replace(b"data_offsets", b"data_0ffsets"))
            case "huge":
                os.truncate(written, 1 << 40)
            case "long header":
                written.write_bytes((1 << 40).to_bytes(8, "little") + content[8:])


class _Handler(BaseHTTPRequestHandler):
    server_of: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        outer = self.server_of
        card = {"id": outer.name, "object": "model", "owned_by": outer.api, "max_model_len": outer.max_model_len}
        cards = [card, {**card, "id": "adapter"}] if outer.fault == "two models" else [card]
        if outer.fault == "no owner":
            card["owned_by"] = "somebody"
        if outer.fault == "strange owner":
            card["owned_by"] = {}
        with suppress(OSError):
            if self.path in _LOADING:
                is_there = outer.load is not None and outer.api == _LOADING[self.path]
                self._json(405 if is_there else 404, {"detail": "Method Not Allowed" if is_there else "Not Found"})
                return
            self._json(200, {"object": "list", "data": cards})

    def do_POST(self) -> None:
        outer = self.server_of
        with suppress(OSError):  # the client has gone
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            outer.seen_headers = dict(self.headers)
            outer.busy += 1
            outer.most_busy = max(outer.most_busy, outer.busy)
            time.sleep(outer.delay_s)
            outer.busy -= 1
            if outer.late_fault is not None and len(outer.texts) >= outer.late_fault[0]:
                outer.fault = outer.late_fault[1]
            if outer.fault == "dead":
                self.close_connection = True
                return
            if self.path == "/tokenize" and outer.tokens is not None:
                self._json(200, {"count": len(outer.tokens), "max_model_len": 64, "tokens": outer.tokens})
            elif self._is_wrong():
                return
            elif self.path in _LOADING:
                self._load(body)
            elif self.path == "/reset_prefix_cache" and outer.load is not None:
                self._json(200, {"success": outer.fault != "busy cache"})
            elif "ignore_eos" in body and self.path == "/v1/completions" and outer.api == "vllm":
                self._vllm_text(body)
            elif body.get("sampling_params", {}).get("max_new_tokens") and outer.api == "sglang":
                self._sglang_text(body)
            elif self.path == "/v1/completions" and outer.api == "vllm":
                self._vllm(body)
            elif self.path == "/generate" and outer.api == "sglang":
                self._sglang(body)
            else:
                self._json(404, {"detail": "Not Found"})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _is_wrong(self) -> bool:
        """True if a fault below the protocol has been answered."""
        match self.server_of.fault:
            case "redirect":
                self._send(307, b"", Location="http://127.0.0.2/v1/completions")
            case "page":
                self._send(200, b"<html>")
            case "deep":
                self._send(200, b"[" * 100_000)
            case "key":
                self._json(401, {"error": "Unauthorized"})
            case "not implemented":
                self._json(501, {"detail": "Not Implemented"})
            case "busy":
                self._json(503, {"detail": "overloaded"})
            case "half":
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
                self.wfile.write(b"{")
                self.close_connection = True
            case "endless" | "drip":
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                for _ in range(100_000):
                    self.wfile.write(b" " * (1 << 20) if self.server_of.fault == "endless" else b" ")
                    time.sleep(0.0 if self.server_of.fault == "endless" else 0.05)
            case _:
                return False
        return True

    def _load(self, body: dict[str, Any]) -> None:
        """The route for new weights."""
        outer = self.server_of
        if outer.load is None or outer.api != _LOADING[self.path]:
            self._json(404, {"detail": "Not Found"})
            return
        if outer.api == "vllm":
            if "method" not in body:
                self._json(400, {"detail": "Missing 'method' in request body"})
                return
            assert body["method"] == "reload_weights"
            folder = body["kwargs"]["weights_path"]
        elif "model_path" not in body:
            self._json(422, {"detail": [{"type": "missing", "loc": ["body", "model_path"]}]})
            return
        else:
            folder = body["model_path"]
        is_broken = outer.fault == "does not load"
        if not is_broken and outer.fault != "keeps":
            outer.model = outer.load(folder)
        outer.loaded.append(folder)
        if outer.api == "vllm":
            self._json(*((500, {"error": {"message": "Worker failed"}}) if is_broken else (200, {"results": [None]})))
        else:
            self._json(400 if is_broken else 200, {"success": not is_broken, "message": "x", "num_paused_requests": 0})

    def _sample(self, prompt: list[int], options: dict[str, Any], tokens: int, seed: int) -> tuple[list[int], str]:
        """The text after a prompt, and the reason for its end."""
        outer, new, generator = self.server_of, [], np.random.default_rng(seed)
        assert (options["top_k"], options["min_p"], options["repetition_penalty"]) == (-1, 0.0, 1.0)
        assert not options["skip_special_tokens"] and "n" not in options
        ends, reason = options["stop_token_ids"], "length"
        while len(new) < tokens:
            scores = outer.model([*prompt, *new])[-1]
            if options["temperature"] > 0.0:
                chances = np.exp(scores / options["temperature"])
                chances /= chances.sum()
                order = np.argsort(-chances)
                kept = order[: 1 + np.searchsorted(np.cumsum(chances[order]), options["top_p"])]
                new.append(int(generator.choice(kept, p=chances[kept] / chances[kept].sum())))
            else:
                new.append(int(scores.argmax()))
            if new[-1] in ends:
                reason = "stop"
                break
        outer.written.append((prompt, new))
        return self._spoiled(new, reason, tokens)

    def _spoiled(self, new: list[int], reason: str, tokens: int) -> tuple[list[int], str]:
        """A text with a fault."""
        match self.server_of.fault:
            case "beyond":
                new = [*new[:-1], self.server_of.vocab]
            case "negative":
                new = [*new[:-1], -1]
            case "fractions":
                new = [*new[:-1], 1.0]
            case "more tokens":
                new = [*new, *[1] * tokens]
            case "no tokens":
                new = []
            case "short":
                new, reason = new[:1], "length"
            case "early":
                new, reason = [one for one in new if one > 1][:1] or [2], "stop"
            case "reason":
                reason = "content_filter"
            case "aborts":
                reason = "abort"
        return new, reason

    def _vllm_text(self, body: dict[str, Any]) -> None:
        outer = self.server_of
        outer.bodies.append(body)
        assert body["ignore_eos"] and not body["add_special_tokens"] and body["return_token_ids"]
        if self._refused(body["prompt"], 0, len(body["prompt"]) + body["max_tokens"]):
            return
        new, reason = self._sample(body["prompt"], body, body["max_tokens"], body["seed"])
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": reason, "stop_reason": None}
        if outer.fault != "no ids":
            choice |= {"token_ids": new, "prompt_token_ids": body["prompt"]}
        if outer.fault == "another prompt":
            choice["prompt_token_ids"] = body["prompt"][::-1]
        count = {"two choices": 2, "no choice": 0}.get(outer.fault, 1)
        self._json(200, {"object": "text_completion", "model": outer.name, "choices": [choice] * count, "usage": {}})

    def _sglang_text(self, body: dict[str, Any]) -> None:
        outer, options = self.server_of, body["sampling_params"]
        outer.bodies.append(body)
        assert not options["ignore_eos"] and options["no_stop_trim"]
        if self._refused(body["input_ids"], 0, len(body["input_ids"]) + options["max_new_tokens"]):
            return
        new, reason = self._sample(body["input_ids"], options, options["max_new_tokens"], options["sampling_seed"])
        answer = {"text": "x", "meta_info": {"finish_reason": {"type": reason}, "completion_tokens": len(new)}}
        answer["meta_info"]["prompt_tokens"] = len(body["input_ids"]) - (outer.fault == "another prompt")
        if outer.fault != "no ids":
            answer["output_ids"] = new
        self._json(200, [answer] if outer.fault == "two choices" else answer)

    def _refused(self, ids: list[int], top_k: int, length: int) -> bool:
        outer = self.server_of
        message = None
        if top_k > outer.max_logprobs:
            message = f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {outer.max_logprobs}"
        elif length > outer.max_model_len:
            message = f"This model's maximum context length is {outer.max_model_len} tokens."
        elif max(ids) >= outer.vocab:
            message = f"Token id {max(ids)} is out of vocabulary"
        if message is not None:
            self._json(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
        return message is not None

    def _changed(self, ids: list[int]) -> list[int]:
        """The text that is scored."""
        match self.server_of.fault:
            case "cut":
                return ids[: max(2, len(ids) // 2)]
            case "special token":
                return [0, *ids]
            case "other tokens":
                return [ids[0], *((one + 1) % self.server_of.vocab for one in ids[1:])]
        return ids

    def _vllm(self, body: dict[str, Any]) -> None:
        outer, ids, top_k = self.server_of, body["prompt"], body.get("prompt_logprobs")
        assert body["max_tokens"] == 1 and not body["add_special_tokens"] and "stream" not in body
        is_scored = top_k is not None
        if self._refused(ids, top_k or 0, len(ids) + 1):
            return
        if body["model"] != outer.name:
            self._json(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
            return
        ids = self._changed(ids)
        outer.texts.append(ids)
        entries: list[Any] = [None]
        for row, (top, values, own) in enumerate(zip(*outer.scores(ids, top_k), strict=True) if is_scored else ()):
            scored = {ids[row + 1]: (own, top_k + 3)}
            scored |= {int(token): (values[rank], rank + 1) for rank, token in enumerate(top)}
            entries.append(
                {
                    str(token): {"logprob": float(value), "rank": rank, "decoded_token": f"<{token}>"}
                    for token, (value, rank) in scored.items()
                }
            )
        self._fail(entries)
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
        choice["prompt_logprobs"] = entries if is_scored else None
        if outer.fault not in ("other tokens", "no echo"):
            choice["prompt_token_ids"] = ids
        answer = {"object": "text_completion", "model": outer.name, "choices": [choice], "usage": {}}
        if outer.states_dir is None or outer.fault == "no states" or "request_id" not in body:
            self._json(200, answer)
            return
        name = "-".join(["cmpl", body["request_id"], "0", "b031b788.safetensors"])
        with StatesFile(outer, name, ids) as file:
            self._json(200, {**answer, "kv_transfer_params": {"hidden_states_path": file.named}})

    def _fail(self, entries: list[Any]) -> None:
        """Put a fault into the entries of vLLM."""
        if len(entries) < 3:
            return
        last, keys = entries[-1], list(entries[-1])
        match self.server_of.fault:
            case "fewer":
                del last[keys[-1]]
            case "more":
                used = set(keys)
                spare = [str(one) for one in range(self.server_of.vocab) if str(one) not in used]
                last |= {key: {"logprob": -30.0, "rank": 9} for key in spare[:2]}
            case "NaN":
                last[keys[-1]]["logprob"] = float("nan")
            case "null":
                last[keys[-1]]["logprob"] = None
            case "beyond":
                last["100000"] = last.pop(keys[-1])
            case "shifted":
                entries[1:] = [{**one} for one in (*entries[2:], entries[1])]
            case "probabilities":
                for one in last.values():
                    one["logprob"] = float(np.exp(one["logprob"]))
            case "contradiction":
                last[keys[0]]["logprob"] = 0.0
            case "none":
                entries.clear()

    def _sglang(self, body: dict[str, Any]) -> None:
        outer, ids, top_k = self.server_of, body["input_ids"], body["top_logprobs_num"]
        assert body["sampling_params"]["max_new_tokens"] == 0 and body["logprob_start_len"] == 0
        if self._refused(ids, 0, len(ids)):
            return
        ids = self._changed(ids)
        outer.texts.append(ids)
        top, values, own = outer.scores(ids, top_k)
        tops: list[list[list[Any]]] = [
            [[float(value), int(token), None] for value, token in zip(*row, strict=True)]
            for row in zip(values, top, strict=True)
        ]
        if outer.fault == "fewer":
            tops[-1].pop()
        if outer.fault == "NaN":
            tops[-1][-1][0] = float("nan")
        owns = [[float(value), token, None] for value, token in zip(own, ids[1:], strict=True)]
        meta = {
            "id": "1",
            "prompt_tokens": len(ids),
            "input_token_logprobs": [[None, ids[0], None], *owns],
            "input_top_logprobs": [None, *tops],
        }
        self._json(200, {"text": "", "output_ids": [], "meta_info": meta})
