"""Attempts: what a model is asked and heard to say, token by token, with an engine that says what a test wants."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from equigrad.data.tokenizers import byte_tokenizer, train_bpe
from equigrad.errors import UserError
from equigrad.rl.attempts import Attempts
from equigrad.rl.engine.protocol import Completion, Request, Tokens
from equigrad.rl.tasks.registry import Tasks
from tests.rl.tasks.given import rl, write

BYTES = byte_tokenizer()
END = BYTES.eos_id


def encoded(text: str) -> list[int]:
    return BYTES.encode_batch([text])[0].tolist()


class Parrot:
    """An engine that answers each request as ``said`` tells, by its text, and ends its turns; ``asked``: all calls."""

    def __init__(self, said: Callable[[str, int], str], tokenizer: Any = BYTES) -> None:
        self._said, self._tokenizer, self.asked = said, tokenizer, list[Sequence[Request]]()

    def __call__(self, requests: Sequence[Request]) -> Mapping[str, Completion]:
        self.asked.append(requests)
        return {r.id: self._answer(r, int(r.id.rpartition("#")[2])) for r in requests}

    def _answer(self, request: Request, number: int) -> Completion:
        text = self._said(self._tokenizer.decode(request.prompt), number)
        ids = self._tokenizer.encode_batch([text])[0].tolist()
        if not any(text.endswith(stop) for stop in request.stop_texts):
            ids.append(max(request.stop_ids))  # the end of a turn, where there is one
        finish: Any = "stop"
        if len(ids) > request.most:
            ids, finish = ids[: request.most], "length"
        numbers = tuple(-0.5 - n for n in range(len(ids)))
        tokens = Tokens(tuple(ids), numbers, numbers, (0.1,) * len(ids), (request.version,) * len(ids))
        return Completion(request.id, tokens, finish)


@contextmanager
def attempts(task: Any, capacity: int = 96, tokenizer: Any = BYTES, **changes: Any) -> Iterator[Attempts]:
    config = rl(task, **changes)
    with Tasks(config, 5) as tasks:
        yield Attempts(config, tasks, tokenizer, capacity, 5)


def solve(text: str, number: int) -> str:
    """Every other attempt is right."""
    return str(eval(text.rstrip("=")) + number % 2)


def test_a_group_is_asked_one_question_and_every_attempt_draws_its_own_tokens() -> None:
    parrot = Parrot(solve)
    with attempts("arithmetic", temperature=0.7, top_k=9, top_p=0.5, longest=20) as made:
        problems = [made.tasks.problem(n, made.tasks.begin()) for n in range(2)]
        found = made.make(problems, 4, 3, parrot)
    (requests,) = parrot.asked
    assert len({r.seed for r in requests}) == len({r.id for r in requests}) == 8
    assert [r.group for r in requests] == [p.id for p in problems for _ in range(4)]
    for request in requests:
        assert (request.temperature, request.top_k, request.top_p, request.version, request.most) == (
            0.7,
            9,
            0.5,
            3,
            20,
        )
        assert request.stop_ids == {END}
    assert [a.reward for a in found] == [1.0, 0.0] * 4
    for attempt in found:
        rollout = attempt.rollout()
        (segment,) = rollout.segments
        said = [*encoded(attempt.conversation.completion), END]
        assert segment.ids.tolist() == [BYTES.bos_id, *encoded(str(attempt.problem.prompt)), *said]
        assert segment.sampled.sum() == len(said) == rollout.tokens == attempt.sampled
        assert segment.ids[1:][segment.sampled].tolist() == said
        assert segment.logprob[segment.sampled].tolist() == [-0.5 - n for n in range(len(said))]
        assert set(segment.versions[segment.sampled]) == {3}
        assert (rollout.group, rollout.reward) == (attempt.problem.id, attempt.reward)


def test_evaluation_takes_the_likeliest_tokens_of_all() -> None:
    parrot = Parrot(solve)
    with attempts("arithmetic", temperature=0.7, top_k=9, top_p=0.5) as made:
        made.make([made.tasks.problem(0, made.tasks.begin(), "held_out")], 1, 0, parrot, greedy=True)
    ((request,),) = parrot.asked
    assert (request.temperature, request.top_k, request.top_p) == (0, 0, 1)


def calls(text: str, number: int) -> str:
    """The calculator is asked; what it says is repeated, or forgotten by every other."""
    if "<result>" not in text:
        return f"<calc>{text.split(' = ')[0]}</calc>"
    return "0" if number % 2 else text.rpartition("<result>")[2].removesuffix("</result>")


def test_what_an_environment_says_is_read_and_not_learned() -> None:
    parrot = Parrot(calls)
    with attempts("calculator", capacity=400) as made:
        (right, wrong) = made.make([made.tasks.problem(0, made.tasks.begin())], 2, 0, parrot)
    assert [len(call) for call in parrot.asked] == [2, 2]
    assert all(r.stop_texts == ("</calc>",) for r in parrot.asked[0])
    assert [r.group for r in parrot.asked[1]] == [None, None]  # their texts differ by now
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    (segment,) = right.rollout().segments
    turns = right.conversation.turns
    learned = [*encoded(turns[0].text), *encoded(turns[2].text), END]
    assert segment.ids[1:][segment.sampled].tolist() == learned
    whole = [*encoded(str(right.problem.prompt)), *encoded(turns[0].text), *encoded(turns[1].text)]
    assert segment.ids[1 : 1 + len(whole)].tolist() == whole


def test_a_chat_goes_on_as_its_template_writes_it() -> None:
    tokenizer = train_bpe(["some words to learn 12 + 3 <calc> </calc> <result>"] * 3, 300)
    parrot = Parrot(calls_in_a_chat, tokenizer)
    with attempts("calculator", 500, tokenizer, chat=True) as made:
        (attempt,) = made.make([made.tasks.problem(1, made.tasks.begin())], 1, 0, parrot)
    assert attempt.reward == 1.0
    (segment,) = attempt.rollout().segments
    messages = [*attempt.problem.prompt]
    for turn in attempt.conversation.turns:
        messages.append({"role": "assistant" if turn.author == "model" else "user", "content": turn.text})
    (whole,) = tokenizer.encode_batch([tokenizer.template.text(messages).rstrip()], special=True)
    assert tokenizer.decode(segment.ids) == tokenizer.decode(whole)
    (end,) = tokenizer.turn_ends()
    assert segment.ids.tolist().count(end) == whole.tolist().count(end)
    assert segment.ids[1:][segment.sampled][-1] == end


def calls_in_a_chat(text: str, number: int) -> str:
    question = text.partition("user\n")[2]
    return calls(
        question if "<result>" not in question else "<result>" + question.split("<result>")[1].split("\n")[0], 0
    )


def test_a_template_that_rewrites_the_past_begins_a_new_segment() -> None:
    forgets = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = byte_tokenizer().replaced(chat_template=forgets)
    parrot = Parrot(lambda text, _: calls(text.partition("[user]")[2].replace("[assistant]", ""), 0), tokenizer)
    with attempts("calculator", 500, tokenizer, chat=True) as made:
        (attempt,) = made.make([made.tasks.problem(1, made.tasks.begin())], 1, 0, parrot)
    first, second = attempt.rollout().segments
    assert "<calc>" in tokenizer.decode(first.ids)
    assert "<calc>" not in tokenizer.decode(second.ids)
    said = [turn.text for turn in attempt.conversation.turns if turn.author == "model"]
    assert tokenizer.decode(first.ids[1:][first.sampled]) == said[0]
    assert tokenizer.decode(second.ids[1:][second.sampled]) == said[1]


def test_an_answer_that_is_cut_off_ends_there_and_is_judged_as_it_is() -> None:
    with attempts("calculator", capacity=400, longest=5) as made:
        (attempt,) = made.make([made.tasks.problem(0, made.tasks.begin())], 1, 0, Parrot(calls))
    assert attempt.truncated
    assert attempt.rollout().truncated
    assert attempt.conversation.completion == "<calc"
    assert attempt.reward == 0
    with attempts("calculator", capacity=40) as made:  # no room for what the calculator says
        problem = made.tasks.problem(0, made.tasks.begin())
        (attempt,) = made.make([problem], 1, 0, Parrot(lambda text, _: f"<calc>{'1+' * 9}1</calc>"))
        assert attempt.truncated
        assert len(attempt.texts[-1].ids) <= 40


def test_the_reward_falls_before_an_answer_is_cut_off() -> None:
    """DAPO, equation 13: from 0 to -1 over the last 4 of 8 tokens."""
    for length, taken in ((3, 0.0), (4, 0.0), (5, 0.25), (7, 0.75), (8, 1.0)):
        with attempts("arithmetic", longest=8, overlong=4) as made:
            parrot = Parrot(lambda text, _, n=length: solve(text, 0).rjust(n - 1, " "))  # type: ignore[misc]
            problem = next(
                p for n in range(9) if len(solve((p := made.tasks.problem(n, made.tasks.begin())).prompt, 0)) == 1
            )  # type: ignore[arg-type]
            (attempt,) = made.make([problem], 1, 0, parrot)
        assert attempt.reward == pytest.approx(1 - taken), length


@pytest.mark.parametrize("task", ["arithmetic", "calculator", "countdown", "sequences", "format"])
def test_a_solved_problem_is_what_an_attempt_that_says_its_solution_would_be(task: str) -> None:
    with attempts(task, capacity=400) as made:
        problem = made.tasks.problem(2, made.tasks.begin())
        turns = iter(made.tasks.solution(problem))
        (attempt,) = made.make([problem], 1, 0, Parrot(lambda *_: next(turns)))
        (sample,) = made.solved(problem)
    (segment,) = attempt.rollout().segments
    assert attempt.reward == 1
    assert sample.ids.tolist() == segment.ids[:-1].tolist()
    assert sample.labels.tolist() == segment.ids[1:].tolist()
    assert sample.loss.tolist() == segment.sampled.tolist()


def test_a_question_without_room_for_an_answer_is_an_error_that_names_it() -> None:
    with attempts("arithmetic", capacity=4) as made, pytest.raises(UserError, match=r"data\.context = 4"):
        made.make([made.tasks.problem(0, made.tasks.begin())], 1, 0, Parrot(solve))


def test_a_task_without_solutions_cannot_be_imitated(tmp_path: Path) -> None:
    text = "from equigrad.rl.tasks import *\nclass Mute(Task):\n    def draw(self, draw, level):\n"
    file = write(
        tmp_path / "mute.py",
        f"{text}        return Question('?', {{}})\n    def verify(self, c):\n        return 1.0\n",
    )
    with attempts(f"{file}:Mute") as made, pytest.raises(UserError, match="does not tell how problem"):
        made.solved(made.tasks.problem(0, made.tasks.begin()))


def test_stop_texts_end_a_turn_however_they_are_made_of_tokens() -> None:
    """A BPE may join the end of a call with what follows; the environment still hears the call."""
    with attempts("calculator", capacity=400) as made:
        parrot = Parrot(lambda text, n: calls(text, n) + ("\n" if "<result>" not in text else ""))
        (attempt,) = made.make([made.tasks.problem(0, made.tasks.begin())], 1, 0, parrot)
    assert [turn.author for turn in attempt.conversation.turns] == ["model", "environment", "model"]
    assert attempt.conversation.turns[0].text.endswith("</calc>")
