"""An engine over HTTP: what it answers, what it refuses, and that an engine at the other end gets what one in the same
process would give. Real servers, real sockets."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.config.rl import Servers
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.errors import UserError
from equigrad.models.decoder import Decoder
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
from equigrad.rl.engine.external import ExternalEngine, asked, completion
from equigrad.rl.engine.protocol import Completion, Request
from equigrad.rl.engine.server import Server
from equigrad.rl.engine.service import Service
from equigrad.rl.sync import write_weights
from tests.jobs import make_trainer, tiny_job
from tests.rl.engine.given import requests, served

TOKENIZER = byte_tokenizer()


def made(folder: Path, seed: int = 3) -> Decoder:
    return make_trainer(tiny_job(seed=seed, model__initializer_range=0.2), folder).model


def own_engine(model: Decoder, slots: int = 4) -> EmbeddedEngine:
    weights = dict(model.named_parameters())
    return EmbeddedEngine(model, Limits(slots, 96), weights, 1, decode=TOKENIZER.decode)


@contextmanager
def serving(model: Decoder, slots: int = 4) -> Iterator[str]:
    with Service(own_engine(model, slots)) as service:
        server = Server(service, model.config, TOKENIZER, 96, "tiny", "127.0.0.1", 0)
        with server.running() as url:
            yield url


def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def external(*urls: str, **changes: Any) -> ExternalEngine:
    given = {"urls": list(urls), "weights": "unused", "timeout_s": 20.0} | changes
    engine = ExternalEngine(Servers.model_validate(given), 257)
    engine._version = 1
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return made(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Decoder) -> Iterator[str]:
    with serving(model) as address:
        yield address


def test_an_engine_elsewhere_gives_what_one_here_gives(model: Decoder, url: str) -> None:
    texts = requests(20, temperature=0.9, top_p=0.9, top_k=50, stop_ids=frozenset({7, 256}))
    texts += [replace(r, id=f"stopped {r.id}", stop_texts=("e", "\n")) for r in requests(20)]
    expected = served(own_engine(model), texts)
    found = {c.id: c for c in external(url).generate(texts)}
    assert {name: c.tokens.ids for name, c in found.items()} == {name: c.tokens.ids for name, c in expected.items()}
    for name, own in expected.items():
        assert found[name].finish == own.finish
        assert found[name].tokens.versions == own.tokens.versions
        for ours, theirs in (
            (own.tokens.log_probs, found[name].tokens.log_probs),
            (own.tokens.entropies, found[name].tokens.entropies),
        ):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_begun_completion_goes_on(url: str) -> None:
    (request,) = requests(12, [(5, 6, 7)])
    (whole,) = external(url).generate([request])
    begun = Completion(
        request.id,
        type(whole.tokens)(
            *(getattr(whole.tokens, f)[:4] for f in ("ids", "log_probs", "kept_log_probs", "entropies", "versions"))
        ),
        None,
    )
    (found,) = external(url).generate([begun.continued(request, 1)])
    assert found.tokens.ids == whole.tokens.ids


def test_the_interface_is_openai_s(url: str) -> None:
    status, health = 200, json.loads(urllib.request.urlopen(url + "/health").read())
    assert (status, health["status"], health["version"]) == (200, "ok", 1)
    assert json.loads(urllib.request.urlopen(url + "/v1/models").read())["data"][0]["id"] == "tiny"
    body = {"prompt": ["Call me", "It is"], "n": 2, "max_tokens": 5, "seed": 9, "logprobs": 1, "temperature": 0.5}
    status, answer = post(url, "/v1/completions", body)
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 14, "completion_tokens": 20, "total_tokens": 34}
    for choice in answer["choices"]:
        ids = choice["equigrad"]["ids"]
        assert choice["finish_reason"] == "length"
        assert choice["text"] == TOKENIZER.decode(ids)
        assert choice["logprobs"]["tokens"] == [TOKENIZER.token_text(i) for i in ids]
        assert choice["logprobs"]["token_logprobs"] == choice["equigrad"]["log_probs"]
    assert post(url, "/v1/completions", body)[1]["choices"] == answer["choices"]  # a seed decides
    status, chat = post(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
    assert status == 200
    assert chat["choices"][0]["message"]["role"] == "assistant"
    status, cut = post(url, "/v1/completions", {"prompt": "a", "max_tokens": 60, "stop": "e", "seed": 1})
    assert "e" not in cut["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/v1/completions", b"{", 400, "JSON"),
        ("/v1/completions", b"\xff", 400, "body"),
        ("/v1/completions", {}, 400, "prompt: Field required"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, 400, "its prompt is empty"),
        ("/v1/completions", {"prompt": [999]}, 400, "token 999 is not in the vocabulary"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1000}, 400, "do not fit"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "stream": True}, 400, "stream: not supported"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias: not supported"),
        ("/v1/completions", {"prompt": "a", "version": 2}, 409, "version 2 is wanted"),
        ("/v1/completions", {"prompt": "a", "begun": {"ids": [1, 2]}}, 400, "begun: streams of unequal length"),
        ("/v1/completions", {"prompt": "a", "begun": {"idz": [1, 2]}}, 400, "begun"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": 3}]}, 400, "chat template"),
        ("/update_weights", {"folder": "/nowhere", "version": 2}, 400, "holds no finished weights"),
        ("/v2/completions", {}, 404, "there is no /v2/completions"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_the_server_goes_on(
    url: str, path: str, body: Any, status: int, why: str
) -> None:
    found, answer = post(url, path, body)
    assert (found, why in answer["error"]["message"]) == (status, True), answer
    assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def test_callers_at_once_share_a_batch_and_get_their_own(model: Decoder, url: str) -> None:
    given = requests(16, [(n, n + 1) for n in range(12)])
    expected = served(own_engine(model), given)
    found: dict[str, Completion] = {}

    def ask(request: Request) -> None:
        (found[request.id],) = external(url).generate([request])

    threads = [threading.Thread(target=ask, args=(request,)) for request in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: c.tokens.ids for n, c in found.items()} == {n: c.tokens.ids for n, c in expected.items()}


def test_new_weights_are_served_bit_for_bit_and_old_versions_refused(tmp_path: Path) -> None:
    first, second = made(tmp_path / "1"), made(tmp_path / "2", seed=4)
    with serving(first) as url:
        engine = external(url)
        folder = write_weights(tmp_path / "sync", second.named_parameters(), second.config, None, 2)
        engine.update(folder, 2)
        given = [replace(r, version=2) for r in requests(14)]
        found = {c.id: c for c in engine.generate(given)}
        weights = dict(second.named_parameters())
        expected = served(EmbeddedEngine(second, Limits(4, 96), weights, 2), given)
        assert {n: c.tokens.ids for n, c in found.items()} == {n: c.tokens.ids for n, c in expected.items()}
        for name, parameter in first.named_parameters():
            assert torch.equal(parameter, weights[name]), name
        with pytest.raises(UserError, match="wants the weights of version 1; servers have 2"):
            list(engine.generate(requests()))
        engine._version = 1  # a client that does not know
        with pytest.raises(UserError, match="status 409: version 1 is wanted, and the weights are of version 2"):
            list(engine.generate(requests()))
        (folder / "version.json").write_text('{"version": 3}')
        with pytest.raises(UserError, match="holds the weights of version 3, not 4"):
            engine.update(folder, 4)


def test_weights_that_come_while_requests_are_open_give_these_back_unfinished(tmp_path: Path) -> None:
    model = made(tmp_path / "model")
    with serving(model) as url:
        engine, found = external(url), list[Completion]()
        (request,) = requests(90, [(1, 2)])
        thread = threading.Thread(target=lambda: found.extend(engine.generate([request])))
        thread.start()
        while json.loads(urllib.request.urlopen(url + "/health").read())["open"] == 0:
            time.sleep(0.001)
        other = external(url)
        other.update(write_weights(tmp_path / "sync", model.named_parameters(), model.config, None, 2), 2)
        thread.join()
        (partial,) = found
        if partial.finish is not None:
            pytest.fail("the request was over before the weights came")
        (whole,) = other.generate([partial.continued(request, 2)])
        assert whole.tokens.ids[: len(partial.tokens)] == partial.tokens.ids
        assert set(whole.tokens.versions) == {1, 2} or not partial.tokens


def test_a_stop_gives_back_what_is_open(url: str) -> None:
    given = requests(80)
    looks = iter([False] + [True] * 99)
    found = list(external(url).generate(given, lambda: next(looks)))
    assert sorted(c.id for c in found) == sorted(r.id for r in given)


class Bad(BaseHTTPRequestHandler):
    """A server that answers what it is told, then goes over to a good one."""

    answers: list[Any]
    good: str

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.answers.pop(0) if self.answers else None
        if answer == "hang":
            time.sleep(1.5)
            return
        if answer == "close":
            self.connection.close()
            return
        if answer is None:
            with urllib.request.urlopen(urllib.request.Request(self.good + self.path, body)) as found:
                answer = found.read()
        elif callable(answer):
            with urllib.request.urlopen(urllib.request.Request(self.good + self.path, body)) as found:
                answer = json.dumps(answer(json.loads(found.read()))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An answer whose one choice is changed."""

    def of(answer: Any) -> Any:
        change(answer["choices"][0])
        return answer

    return of


def filled(name: str, value: Any) -> Callable[[Any], Any]:
    """An answer of which one stream is this value at every token."""
    return changed(lambda c: c["equigrad"].update({name: [value] * len(c["equigrad"]["ids"])}))


GARBAGE: dict[str, tuple[Any, str]] = {
    "no JSON": (b"<html>", "no answer"),
    "a list": (b"[]", "not an answer"),
    "no choices": (b'{"choices": []}', "not an answer"),
    "hangs": ("hang", "no answer"),
    "closes": ("close", "no answer"),
    "a token too many": (changed(lambda c: c["equigrad"]["ids"].append(3)), "unequal length"),
    "unknown tokens": (filled("ids", 999), "not of the vocabulary"),
    "text for tokens": (filled("ids", "a"), "not of the vocabulary"),
    "old weights": (filled("versions", 0), "versions [0], not 1"),
    "impossible log-probabilities": (filled("log_probs", 0.5), "log-probability of 0.5"),
    "an end it cannot have": (changed(lambda c: c.update(finish_reason="tool_calls")), "not an answer"),
    "too short": (changed(lambda c: [s.pop() for s in c["equigrad"].values()]), "an end for its length after"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_told_and_asked_again_and_nothing_is_lost_or_doubled(
    kind: str, model: Decoder, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer, why = GARBAGE[kind]
    handler = type("Told", (Bad,), {"answers": [answer], "good": url})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    given = requests(10)
    found = list(external(f"http://127.0.0.1:{server.server_port}", timeout_s=1.0, concurrency=1).generate(given))
    server.shutdown()
    server.server_close()
    expected = served(own_engine(model), given)
    assert sorted(c.id for c in found) == sorted(expected)
    assert all(c.tokens.ids == expected[c.id].tokens.ids for c in found)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("note: request 0")
    assert why in told[0]


def test_a_server_that_stays_bad_is_one_error(url: str) -> None:
    with pytest.raises(UserError, match=r"request \d was not answered: http://127.0.0.1:9: no answer"):
        list(external("http://127.0.0.1:9", attempts=2).generate(requests()))
    found = list(external("http://127.0.0.1:9", url, attempts=2).generate(requests()))  # another one may do
    assert len(found) == len(requests())


def test_openai_s_own_numbers_are_enough() -> None:
    (request,) = requests(3, [(1, 2)])
    tokens = ["token_id:5", "token_id:6", "token_id:7"]
    answer = {
        "choices": [{"finish_reason": "length", "logprobs": {"tokens": tokens, "token_logprobs": [-1.0, None, -2.5]}}]
    }
    found = completion(request, answer, 257).tokens
    assert found.ids == (5, 6, 7)
    assert found.log_probs[::2] == (-1.0, -2.5)
    assert found.log_probs[1] != found.log_probs[1]  # not a number: it is in no loss
    assert found.versions == (1, 1, 1)
    assert asked(request)["prompt"] == [1, 2]
