"""Rollout engines on servers that speak OpenAI's interface: ``equigrad serve``, or another that returns token ids.

Every completion is checked before it counts: whose it is, its length, its tokens, its log-probabilities and, where the
server tells, the version of its weights. What does not come in time, or is wrong, is asked again, of the next server if
there are several, and in the end it is one error with what was said. Nothing is counted twice: a completion is given
out once, for the request it answers.
"""

import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from equigrad.config.rl import Servers
from equigrad.errors import UserError
from equigrad.rl.engine.protocol import Completion, Finish, Request, Tokens, never

_FINISH: Mapping[str, Finish | None] = {"stop": "stop", "eos": "stop", "length": "length", "abort": None}
_LOOK_S = 0.2
"""Seconds between looks whether to stop."""


class ServerError(Exception):
    """A server did not answer, or not what it was asked for."""


class ExternalEngine:
    """See ``Engine``; ``update`` has servers take weights from a folder, and is its ``load``."""

    def __init__(self, config: Servers, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """Of the weights that all servers have; None before they were given any."""
        return self._version

    def update(self, folder: Path, version: int) -> None:
        """Have every server take the weights of a version. ``UserError`` where one does not; then none is asked."""
        self._version = None
        for url in self._config.urls:
            body = {"folder": str(folder.resolve()), "version": version, "abort": True}
            try:
                told = _post(url, "/update_weights", body, self._config.timeout_s)
            except ServerError as error:
                raise UserError(f"{url} does not take the weights of version {version}: {error}") from None
            if not isinstance(told, dict) or told.get("version") != version:
                raise UserError(f"{url} was given the weights of version {version} and says {_shown(told)}")
        self._version = version

    def generate(self, requests: Sequence[Request], stopping: Callable[[], bool] = never) -> Iterator[Completion]:
        """See ``Engine``. ``UserError`` for a request that no server has answered; what else was asked is given up."""
        for request in requests:
            if request.version != self._version:
                raise UserError(
                    f"request {request.id}: it wants the weights of version {request.version}; servers have"
                    f" {self._version}"
                )
        pool = ThreadPoolExecutor(self._config.concurrency, "rollout")
        try:
            urls = self._config.urls
            open_: dict[Future[Completion], Request] = {
                pool.submit(self._asked, request, number % len(urls)): request
                for number, request in enumerate(requests)
            }
            while open_ and not stopping():
                for future in wait(open_, _LOOK_S, FIRST_COMPLETED).done:
                    yield future.result()
                    del open_[future]
            for request in open_.values():
                yield Completion(request.id, request.begun, None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _asked(self, request: Request, first: int) -> Completion:
        urls, faults = self._config.urls, []
        for attempt in range(self._config.attempts):
            url = urls[(first + attempt) % len(urls)]
            try:
                return completion(
                    request, _post(url, "/v1/completions", asked(request), self._config.timeout_s), self._vocabulary
                )
            except ServerError as error:
                faults.append(f"{url}: {error}")
                print(f"note: request {request.id}, {faults[-1]}", file=sys.stderr, flush=True)
        raise UserError(f"request {request.id} was not answered: {'; '.join(dict.fromkeys(faults))}")


def asked(request: Request) -> dict[str, Any]:
    """A request as JSON. Keys beyond OpenAI's are those of vLLM where it has them."""
    body: dict[str, Any] = {
        "prompt": list(request.prompt), "max_tokens": request.most, "temperature": request.temperature,
        "top_p": request.top_p, "top_k": request.top_k or -1, "seed": request.seed,
        "stop_token_ids": sorted(request.stop_ids), "ignore_eos": True, "include_stop_str_in_output": True,
        "logprobs": 0, "return_tokens_as_token_ids": True, "skip_special_tokens": False, "version": request.version,
    }  # fmt: skip
    if request.stop_texts:
        body["stop"] = list(request.stop_texts)
    if request.begun:
        body["begun"] = {name: list(values) for name, values in vars(request.begun).items()}
    return body


def completion(request: Request, answer: Any, vocabulary: int) -> Completion:
    """The completion that a server's answer holds. ``ServerError`` where it holds none, or not one of this request."""
    try:
        (choice,) = answer["choices"]
        finish = _FINISH[choice["finish_reason"]]
        tokens = _tokens(choice, request)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ServerError(f"not an answer ({type(error).__name__}: {error}): {_shown(answer)}") from None
    wrong = None
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens.ids):
        wrong = f"tokens that are not of the vocabulary of {vocabulary}"
    elif not (len(tokens) or finish is None) or len(tokens) > request.most:
        wrong = f"{len(tokens)} tokens, of at most {request.most}"
    elif tokens.ids[: len(request.begun)] != request.begun.ids:
        wrong = "other tokens than those that were there"
    elif set(tokens.versions[len(request.begun) :]) - {request.version}:
        wrong = f"tokens of the weights of versions {sorted(set(tokens.versions))}, not {request.version}"
    elif any(number > 1e-3 for number in tokens.log_probs):
        wrong = f"a log-probability of {max(tokens.log_probs)}"
    elif finish == "length" and len(tokens) < request.most:
        wrong = f"an end for its length after {len(tokens)} tokens, of {request.most}"
    if wrong:
        raise ServerError(f"an answer with {wrong}")
    return Completion(request.id, tokens, finish)


def _tokens(choice: Mapping[str, Any], request: Request) -> Tokens:
    """Of ``equigrad serve`` all numbers; of others what OpenAI's interface has."""
    if (own := choice.get("equigrad")) is not None:
        found = {name: tuple(map(_number, values)) if name != "ids" else tuple(values) for name, values in own.items()}
        return Tokens(**found)
    logprobs = choice["logprobs"]
    ids = tuple(int(token.removeprefix("token_id:")) for token in logprobs["tokens"])
    numbers = tuple(map(_number, logprobs["token_logprobs"]))
    nothing = (math.nan,) * len(ids)
    return Tokens(ids, numbers, nothing, nothing, (request.version,) * len(ids))


def _number(value: Any) -> Any:
    """JSON has no NaN: what is no number counts as one."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


def _post(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    """``ServerError`` for all that can go wrong on the way."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url.rstrip("/") + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise ServerError(f"status {error.code}: {_shown(_message(error.read()))}") from None
    except (OSError, ValueError) as error:
        raise ServerError(f"no answer ({type(error).__name__}: {error})") from None


def _message(data: bytes) -> Any:
    try:
        return json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return data[:200]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
