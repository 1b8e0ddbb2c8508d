"""A step of reinforcement learning against TRL's ``GRPOTrainer``: the same small Qwen2, word-level tokenizer, prompts,
rewards, group size, lengths, optimizer and threads, sampling and update included.

Two workloads. *short*: completions of one length. *tail*: prompts of 256 tokens and completions of heavy-tailed length,
from 8 to 256 tokens; a batch of TRL's is as long as its longest. Lengths are the same lists on both sides and are
forced: in TRL by a processor of logits that lets a row end where it is to end, here by the limit of the request. TRL's
trainer runs, and between two of its steps one of ours does, so both see the same moments of the machine.

    python benchmarks/rl_step.py
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import arguments, pin_threads, ratio, show, spread, write

OPTIONS = arguments("rl_step", __doc__ or "", rounds=7, warm_up=2, prompts=4, group=8)
pin_threads(OPTIONS.threads)

import torch  # noqa: E402
from tokenizers import Tokenizer as Words  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import (  # noqa: E402
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)

VOCABULARY, HIDDEN, LAYERS = 1024, 256, 4
SAMPLES = OPTIONS.prompts * OPTIONS.group
WORKLOADS = {"short": (32, [16]), "tail": (256, [])}
"""Tokens of a prompt, and lengths of completions; none: heavy-tailed ones."""
LEARNING_RATE = 1e-4

TASK = '''
from equigrad.rl.tasks import Conversation, Draw, Question, Task


class Evens(Task):
    """The share of words that end with an even digit."""

    def __init__(self, words: int, vocabulary: int):
        self.words, self.vocabulary = words, vocabulary

    def draw(self, draw: Draw, level: int) -> Question:
        return Question(" ".join(f"w{draw.below(self.vocabulary - 4)}" for _ in range(self.words - 1)), {})

    def verify(self, conversation: Conversation) -> float:
        said = conversation.completion.split()
        return sum(word[-1] in "02468" for word in said) / max(len(said), 1)
'''


def reward(completions: list[str], **_: Any) -> list[float]:
    """The same, as TRL wants it."""
    return [sum(w[-1] in "02468" for w in text.split()) / max(len(text.split()), 1) for text in completions]


def lengths(step: int, given: list[int]) -> list[int]:
    """Of the completions of a step: Pareto with exponent 1.2 from 8 tokens on, at most 256."""
    if given:
        return (given * SAMPLES)[:SAMPLES]
    drawn = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(step), dtype=torch.float64).tolist()
    return [min(256, int(8 * (1 - u) ** (-1 / 1.2))) for u in drawn]


def word_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Saved in the folder too."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = special + [f"w{n}" for n in range(VOCABULARY - len(special))]
    engine = Words(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    engine.pre_tokenizer = WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=engine, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    found.save_pretrained(folder)
    return found


class Ends(LogitsProcessor):
    """Lets row n end with token ``wanted[n]``, and not before."""

    def __init__(self, prompt: int, wanted: list[int], eos: int) -> None:
        self._prompt, self._wanted, self._eos = prompt, torch.tensor(wanted), eos

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = self._wanted == ids.shape[1] - self._prompt + 1
        scores[:, self._eos] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self._eos] = 0.0
        return scores


class Forced(Qwen2ForCausalLM):
    """A model whose completions have the lengths of the step."""

    wanted: list[int]
    eos: int

    def generate(self, input_ids: torch.Tensor, **more: Any) -> Any:  # type: ignore[override]
        ends = Ends(input_ids.shape[1], self.wanted, self.eos)
        return super().generate(input_ids, logits_processor=LogitsProcessorList([ends]), **more)


def own_side(folder: Path, prompt: int, given: list[int]) -> Any:
    """A function that does one step of ours and returns the tokens that were sampled."""
    from equigrad.config.load import make_job
    from equigrad.data.tokenizers import read_tokenizer
    from equigrad.parallel.stop import StopRequest
    from equigrad.parallel.world import start
    from equigrad.rl.attempts import Attempts
    from equigrad.rl.problems import ProblemStream
    from equigrad.rl.trainer import PolicyTrainer

    (folder / "evens.py").write_text(TASK)
    longest = max(given, default=256)
    job = make_job(
        {
            "data": {"context": prompt + longest, "tokenizer": {"kind": "file", "path": str(folder)}},
            "batch": {"row_tokens": max(2048, prompt + longest)}, "train": {"steps": 10**6},
            "model": {"family": "qwen2", "attention_bias": True, "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
                      "intermediate_size": 704, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
                      "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 1024},
            "optim": {"lr": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
                      "betas": [0.9, 0.999]},
            "rl": {"task": {"name": f"{folder / 'evens.py'}:Evens",
                            "options": {"words": prompt, "vocabulary": VOCABULARY}},
                   "prompts": OPTIONS.prompts, "group_size": OPTIONS.group, "longest": longest, "shown": 0,
                   "slots": SAMPLES, "policy": {"name": "dr_grpo", "longest": longest}},
            "layout": {"threads": OPTIONS.threads},
        },
        "benchmark",
    )  # fmt: skip

    class Limited(Attempts):
        """Attempts of given lengths, which do not end before."""

        def make(self, *words: Any, **more: Any) -> Any:
            self.number, self.wanted = 0, lengths(trainer.step, given)
            return super().make(*words, **more)

        def _request(self, *words: Any) -> Any:
            self.number += 1
            most = self.wanted[self.number - 1]
            return replace(super()._request(*words), most=most, stop_ids=frozenset())

    world = start(job.layout)
    stream = ProblemStream(job, read_tokenizer(folder), world)
    trainer = PolicyTrainer(job, Path(tempfile.mkdtemp(dir=folder)), world, stream)
    assert job.rl is not None
    stream._attempts = Limited(job.rl, stream.attempts.tasks, stream.tokenizer, job.data.context, 0)
    trainer.initialize(0)
    stop = StopRequest()

    def step() -> int:
        record, _ = trainer.update(trainer.next_batch(stop), stop)
        return int(record["loss_tokens"])

    return step, stream.close


def compare(name: str, goal: float) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompt, given = WORKLOADS[name]
    seconds: dict[str, list[float]] = {"trl": [], "equigrad": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = word_tokenizer(folder)
        step, close = own_side(folder, prompt, given)
        config = Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=704, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=1024,
            attn_implementation="sdpa",
        )  # fmt: skip
        model = Forced(config)
        model.eos = words.eos_token_id

        class Turns(TrainerCallback):
            """Times TRL's steps, and does one of ours after each."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                model.wanted = lengths(state.global_step, given)
                self.began = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                seconds["trl"].append(time.perf_counter() - self.began)
                began = time.perf_counter()
                assert step() == sum(lengths(state.global_step - 1, given))
                seconds["equigrad"].append(time.perf_counter() - began)

        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(4, VOCABULARY, (64, prompt), generator=generator).tolist()
        prompts = [words.decode(ids) for ids in drawn]
        settings = GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=SAMPLES, num_generations=OPTIONS.group,
            max_completion_length=max(given, default=256), max_steps=OPTIONS.warm_up + OPTIONS.rounds, beta=0.0,
            loss_type="dr_grpo", learning_rate=LEARNING_RATE, lr_scheduler_type="constant", report_to="none",
            save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=10**6, top_k=0,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward, settings, Dataset.from_dict({"prompt": prompts}), processing_class=words, callbacks=[Turns()]
        )
        trainer.train()
        close()
    for own in seconds.values():
        del own[: OPTIONS.warm_up]
    for side, own in seconds.items():
        show(f"{name}, {side}, samples/s", spread([SAMPLES / s for s in own]), 1)
    faster = ratio(seconds["trl"], seconds["equigrad"])
    show(f"{name}, equigrad over TRL, samples/s (goal {goal})", faster)
    return {"prompt": prompt, "lengths": given or "heavy-tailed", "seconds": seconds, "faster": faster, "goal": goal}


def main() -> None:
    import trl

    result = {"short": compare("short", 1.2), "tail": compare("tail", 2.0)}
    shape = {"samples": SAMPLES, "group": OPTIONS.group, "threads": OPTIONS.threads, "trl": trl.__version__}
    write(OPTIONS.json, shape | result)


if __name__ == "__main__":
    main()
