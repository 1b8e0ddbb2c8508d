"""An engine over HTTP, as OpenAI's interface has it, with what training needs besides.

    GET  /health                  {"status": "ok", "version": 3, "open": 0}
    GET  /v1/models
    POST /v1/completions          text or token ids
    POST /v1/chat/completions     messages
    POST /update_weights          {"folder": "...", "version": 4}: a folder that ``rl.sync`` has written

Beside OpenAI's keys a completion takes, as other servers do, ``top_k``, ``stop_token_ids``, ``ignore_eos`` and
``return_tokens_as_token_ids``; and ``version`` (of the weights: others are refused, 409) and ``begun`` (tokens that are
there already, to be continued). Every choice has ``equigrad``: its token ids, both log-probabilities, entropies and
versions, as ``protocol.Tokens`` has them. ``token_logprobs`` are of the whole vocabulary at the sampling temperature.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equigrad.config.model import Model
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError
from equigrad.rl.engine.protocol import Completion, Request, Tokens
from equigrad.rl.engine.service import Service
from equigrad.rl.sync import read_weights

LARGEST_BODY = 64 << 20
"""Bytes."""
_REASONS = {"stop": "stop", "length": "length", None: "abort"}
_ON: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "logit_bias", "best_of", "suffix", "tools", "stream")
"""What OpenAI's interface has and this one has not: refused where it is asked for, for it would change the answer."""


class _Sampling(BaseModel):
    """What requests of both kinds have."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    n: int = Field(1, ge=1, le=1024)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    version: int | None = None
    return_tokens_as_token_ids: bool = False

    def texts(self) -> tuple[str, ...]:
        """That end a completion."""
        return tuple([self.stop] if isinstance(self.stop, str) else self.stop or ())

    def refused(self) -> list[str]:
        """Keys whose meaning is not kept."""
        given = self.model_extra or {}
        return [
            key for key in _ON if given.get(key) not in (None, 0, False, {}, [], "", 1 if key == "best_of" else None)
        ]


class _Text(_Sampling):
    """A request for completions of text."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = None
    echo: Literal[False] | None = None
    begun: dict[str, list[Any]] | None = None


class _Chat(_Sampling):
    """A request for the next message of a chat."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None


class _Update(BaseModel):
    """New weights."""

    folder: str
    version: int
    abort: bool = False
    """Give back what is unfinished, rather than wait for it."""


class _Refused(Exception):
    """An answer that is an error: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves until it is closed; ``port`` 0 takes any that is free. Each connection has a thread."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, service: Service, model: Model, tokenizer: Tokenizer, capacity: int, name: str, host: str, port: int
    ) -> None:
        """``capacity``: tokens of a prompt and its completion, as the engine has it."""
        self.service, self.model, self.tokenizer = service, model, tokenizer
        self.capacity, self.name = capacity, name
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.server_address[0]!s}:{self.server_port}"

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves in a thread of its own; its address."""
        thread = Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self.url
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        service = self.server.service
        routes: dict[str, Callable[[], Any]] = {
            "/health": lambda: {"status": "ok", "version": service.version, "open": service.load},
            "/v1/models": lambda: {"object": "list", "data": [{"id": self.server.name, "object": "model"}]},
        }
        self._answer(routes.get(self.path))

    def do_POST(self) -> None:
        routes: dict[str, Callable[[], Any]] = {
            "/v1/completions": lambda: self._completions(self._body(_Text)),
            "/v1/chat/completions": lambda: self._chat(self._body(_Chat)),
            "/update_weights": lambda: self._update(self._body(_Update)),
        }
        self._answer(routes.get(self.path))

    def log_message(self, format: str, *args: Any) -> None:
        """A line for every request would hide what matters."""

    def _answer(self, route: Callable[[], Any] | None) -> None:
        status, answer = 200, None
        try:
            if route is None:
                self.close_connection = True  # its body was not read
                raise _Refused(404, f"there is no {self.path}")
            answer = route()
        except _Refused as error:
            status, text = error.status, str(error)
        except UserError as error:
            status, text = 400, str(error)
        except Exception as error:  # the caller must hear of it; the server goes on
            status, text = 500, f"{type(error).__name__}: {error}"
        if status != 200:
            answer = {"error": {"message": text, "type": "invalid_request_error" if status < 500 else "server_error"}}
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked is gone

    def _body(self, kind: type[BaseModel]) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            self.close_connection = True
            raise _Refused(413, f"a body of 0 to {LARGEST_BODY} bytes and its Content-Length are wanted")
        data = self.rfile.read(int(length))
        try:
            body = kind.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise _Refused(400, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None
        if isinstance(body, _Sampling) and (keys := body.refused()):
            raise _Refused(400, f"{', '.join(keys)}: not supported")
        return body

    def _completions(self, body: _Text) -> dict[str, Any]:
        tokenizer, given = self.server.tokenizer, body.prompt
        if not given:
            raise _Refused(400, "prompt: it is empty")
        one_only = isinstance(given, str) or any(isinstance(token, int) for token in given)
        many: list[Any] = [given] if one_only else list(given)
        prompts = [
            [tokenizer.bos_id, *tokenizer.encode_batch([one])[0].tolist()] if isinstance(one, str) else one
            for one in many
        ]
        found = self._complete(body, prompts, body.max_tokens, {tokenizer.eos_id}, _begun(body.begun))
        choices = [
            {"index": index, "text": text, "finish_reason": _REASONS[completion.finish],
             "logprobs": None if body.logprobs is None else self._logprobs(completion, body),
             "equigrad": _numbers(completion)}
            for index, (completion, text) in enumerate(found)
        ]  # fmt: skip
        return self._wrapped("text_completion", prompts, body, found, choices)

    def _chat(self, body: _Chat) -> dict[str, Any]:
        tokenizer = self.server.tokenizer
        prompt = tokenizer.encode_batch([tokenizer.chat_prompt(body.messages)], special=True)[0].tolist()
        most = body.max_completion_tokens or body.max_tokens or max(self.server.capacity - len(prompt), 1)
        found = self._complete(body, [prompt], most, {tokenizer.eos_id} | tokenizer.turn_ends(), Tokens())
        choices = [
            {"index": index, "message": {"role": "assistant", "content": text},
             "finish_reason": _REASONS[completion.finish],
             "logprobs": {"content": self._chat_logprobs(completion)} if body.logprobs else None,
             "equigrad": _numbers(completion)}
            for index, (completion, text) in enumerate(found)
        ]  # fmt: skip
        return self._wrapped("chat.completion", [prompt], body, found, choices)

    def _complete(
        self, body: _Sampling, prompts: list[list[int]], most: int, ends: set[int], begun: Tokens
    ) -> list[tuple[Completion, str]]:
        """Completions in the order of prompts, ``n`` of each, with their texts."""
        service, tokenizer = self.server.service, self.server.tokenizer
        version = service.version if body.version is None else body.version
        if version is None:
            raise _Refused(503, "there are no weights yet")
        if version != service.version:
            raise _Refused(409, f"version {version} is wanted, and the weights are of version {service.version}")
        seed, own = time.time_ns() if body.seed is None else body.seed, set[int]() if body.ignore_eos else ends
        requests = [
            Request(
                f"{number}/{turn}", tuple(prompt), most, version, seed + number * body.n + turn, body.temperature,
                body.top_p, max(body.top_k, 0), frozenset(own | set(body.stop_token_ids)), stop_texts=body.texts(),
                group=str(number), begun=begun,
            )
            for number, prompt in enumerate(prompts)
            for turn in range(body.n)
        ]  # fmt: skip
        found = []
        for future in service.submit(requests):
            try:
                completion = future.result()
            except UserError as error:
                raise _Refused(
                    409 if "the engine has" in str(error) and "version" in str(error) else 400, str(error)
                ) from None
            text = tokenizer.decode(completion.tokens.ids)
            for stop in body.texts():  # as OpenAI's interface has it, without what ends it
                text = text.partition(stop)[0]
            found.append((completion, text))
        return found

    def _logprobs(self, completion: Completion, body: _Text) -> dict[str, Any]:
        texts = [self.server.tokenizer.token_text(token) for token in completion.tokens.ids]
        ids = [f"token_id:{token}" for token in completion.tokens.ids]
        return {
            "tokens": ids if body.return_tokens_as_token_ids else texts,
            "token_logprobs": list(completion.tokens.log_probs), "top_logprobs": None, "text_offset": None,
        }  # fmt: skip

    def _chat_logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {"token": self.server.tokenizer.token_text(token), "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(completion.tokens.ids, completion.tokens.log_probs, strict=True)
        ]

    def _wrapped(
        self, kind: str, prompts: list[list[int]], body: _Sampling, found: list[tuple[Completion, str]], choices: Any
    ) -> dict[str, Any]:
        asked, made = sum(map(len, prompts)), sum(len(completion.tokens) for completion, _ in found)
        usage = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
        return {"id": f"cmpl-{time.time_ns():x}", "object": kind, "created": int(time.time()),
                "model": body.model or self.server.name, "choices": choices, "usage": usage}  # fmt: skip

    def _update(self, body: _Update) -> dict[str, Any]:
        tensors = read_weights(Path(body.folder), self.server.model, body.version)
        self.server.service.update(tensors, body.version, body.abort).result()
        return {"version": self.server.service.version}


def _begun(given: Mapping[str, list[Any]] | None) -> Tokens:
    if given is None:
        return Tokens()
    try:
        return Tokens(**{name: tuple(values) for name, values in given.items()})
    except (TypeError, ValueError) as error:
        raise _Refused(400, f"begun: {error}") from None


def _numbers(completion: Completion) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in vars(completion.tokens).items()}
