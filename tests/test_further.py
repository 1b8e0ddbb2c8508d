"""Multi-token prediction: a transcription in float64, its normalisers, and that it is for training alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equigrad.cli import main
from equigrad.config.lora import Lora
from equigrad.config.model import Model
from equigrad.data.samples import Sample, SampleRef
from equigrad.errors import UserError
from equigrad.evaluation import evaluate
from equigrad.models.decoder import Decoder
from equigrad.models.parts import cut_into_parts
from equigrad.models.specs import parameter_count, parameter_specs, token_flops
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.rows import further_loss_tokens, row_tensors
from tests.jobs import make_trainer, pool_world, tiny_job, write_job

FURTHER = {"model__mtp_layers": 2, "model__mtp_loss_coef": 0.5, "model__initializer_range": 0.1}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """[T, heads, D], at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def block(config: Model, p: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    h = norm(x, p[f"{at}.input_layernorm.weight"], config.rms_norm_eps)
    q, k, v = ((h @ p[f"{at}.self_attn.{w}_proj.weight"].T).unflatten(-1, (-1, config.head_size)) for w in "qkv")
    q, k = rotated(q, config.rope_theta), rotated(k, config.rope_theta)
    k, v = (t.repeat_interleave(config.num_attention_heads // config.kv_heads, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / config.head_size**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    x = x + mixed @ p[f"{at}.self_attn.o_proj.weight"].T
    h = norm(x, p[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up, down = (p[f"{at}.mlp.{w}_proj.weight"] for w in ("gate", "up", "down"))
    return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def transcribed(config: Model, p: Mapping[str, Tensor], sample: Sample) -> list[Tensor]:
    """The sums of a sample's losses: of the next token, and of those further ahead (DeepSeek-V3, equations 21 to 24, as
    written: each module works on the tokens that have something to predict, and on no others)."""
    eps, embedding = config.rms_norm_eps, p["model.embed_tokens.weight"]
    head = embedding if config.tie_word_embeddings else p["lm_head.weight"]
    ids, labels = (torch.from_numpy(t.astype("int64")) for t in (sample.ids, sample.labels))
    x = embedding[ids]
    for layer in range(config.num_hidden_layers):
        x = block(config, p, f"model.layers.{layer}", x)
    losses = [F.cross_entropy(norm(x, p["model.norm.weight"], eps) @ head.T, labels, reduction="sum")]
    for depth in range(1, config.mtp_layers + 1):
        at, count = f"model.layers.{config.num_hidden_layers + depth - 1}", len(ids) - depth
        if count <= 0:
            break
        ahead = norm(embedding[ids[depth:]], p[f"{at}.enorm.weight"], eps)
        joined = torch.cat([ahead, norm(x[:count], p[f"{at}.hnorm.weight"], eps)], 1)
        x = block(config, p, at, joined @ p[f"{at}.eh_proj.weight"].T)
        logits = norm(x, p[f"{at}.shared_head.norm.weight"], eps) @ head.T
        losses.append(F.cross_entropy(logits, labels[depth:], reduction="sum"))
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_is_what_the_paper_says(tmp_path: Path, tied: bool) -> None:
    changes = FURTHER | {"batch__tokens": None, "batch__samples": 9, "optim__clip_norm": 0.0}
    trainer = make_trainer(tiny_job(**changes, model__tie_word_embeddings=tied), tmp_path)
    config = trainer.job.model
    for parameter in trainer.model.parameters():  # norms start at 1, which would hide mistakes
        if parameter.ndim == 1:
            parameter.data += torch.linspace(-0.3, 0.3, len(parameter))
    p = {n: t.detach().double().requires_grad_() for n, t in trainer.model.named_parameters()}
    batch = trainer.stream.next_batch()
    losses = [transcribed(config, p, trainer.stream.read(ref)) for ref in batch.samples]
    counts = [sum(max(s.length - depth, 0) for s in batch.samples) for depth in range(3)]
    terms = [sum(loss[depth] for loss in losses if len(loss) > depth) / counts[depth] for depth in range(3)]
    further = (terms[1] + terms[2]) / 2
    (terms[0] + 0.5 * further).backward()
    gradients: dict[str, Tensor] = {}
    plain = trainer.gradients

    def kept() -> Any:
        found = plain()
        gradients.update({n: g.tensor.clone() for n, g in found.items()})
        return found

    trainer.gradients = kept  # type: ignore[method-assign]
    record, _ = trainer.update(batch, StopRequest())
    assert record["loss"] == pytest.approx(terms[0].item(), rel=1e-6)
    assert record["mtp_loss"] == pytest.approx(further.item(), rel=1e-6)
    assert gradients.keys() == p.keys()
    for name, gradient in gradients.items():
        expected = p[name].grad
        assert expected is not None
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


class _Stream:
    """Two samples: one all in the loss, one whose first three labels are not."""

    def read(self, ref: SampleRef) -> Sample:
        ids = np.arange(ref.length) + 10 * ref.document
        loss = np.ones(ref.length, bool)
        loss[: ref.length - ref.loss_tokens] = False
        return Sample({"ids": ids, "labels": ids + 1, "loss": loss})


def test_rows_look_ahead_within_a_segment_and_labels_are_counted_where_they_are_in_the_loss() -> None:
    refs = [SampleRef(0, 0, 0, 3, 3), SampleRef(0, 1, 0, 5, 2), SampleRef(0, 2, 0, 1, 1)]
    stream: Any = _Stream()
    row = row_tensors(stream, refs, World(tiny_job().layout, 0, 1, 0, torch.device("cpu"), None), 2)
    one, two = row.ahead
    assert one.ids.tolist() == [1, 2, 3, 11, 12, 13, 14, 15, 21]
    assert (one.at.tolist(), one.labels.tolist()) == ([0, 1, 5, 6], [2, 3, 14, 15])
    assert two.ids.tolist() == [2, 3, 3, 12, 13, 14, 15, 15, 21]
    assert (two.at.tolist(), two.labels.tolist()) == ([0, 4, 5], [3, 14, 15])
    assert [further_loss_tokens(stream, refs, depth) for depth in (1, 2, 3, 9)] == [4, 3, 2, 0]


def test_evaluation_and_logits_ignore_it(tmp_path: Path) -> None:
    from equigrad.numerics.native import NativeOps
    from equigrad.numerics.row import Row

    trainer = make_trainer(tiny_job(**FURTHER), tmp_path / "a")
    plain = make_trainer(tiny_job(model__initializer_range=0.1), tmp_path / "b")
    results = [
        evaluate(t.execution, t.stream, t.stream.held_out(500), t.job, pool_world(t.job)) for t in (trainer, plain)
    ]
    assert results[0] == results[1]
    config = plain.job.model.model_copy(update={"mtp_layers": 1})
    model = Decoder(config, NativeOps(), "cpu")
    model.initialize(3)
    assert torch.equal(model(torch.arange(9), Row.of([9])), plain.model(torch.arange(9), Row.of([9])))


def test_exports_leave_it_out_and_a_model_without_it_can_be_given_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    job = tiny_job(**FURTHER, train__steps=1, observe__sample_tokens=4, observe__report=False)
    run = tmp_path / "run"
    assert main(["train", str(write_job(job, tmp_path / "job.toml")), "--run", str(run)]) == 0
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert "2 modules for multi-token prediction are left out" in capsys.readouterr().out
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert sum(p.numel() for p in hf.parameters()) == parameter_count(job.model.model_copy(update={"mtp_layers": 0}))
    file = tmp_path / "more.toml"
    file.write_text(f'model = {{ weights = "{tmp_path / "hf"}", mtp_layers = 1 }}\n'
                    "train = { steps = 1 }\ndata.context = 48\n"
                    "observe = { sample_tokens = 0, report = false }\n")  # fmt: skip
    assert main(["train", str(file), "--run", str(tmp_path / "more")]) == 0
    with pytest.raises(UserError, match="trains no modules for multi-token prediction"):
        parameter_specs(job.model, Lora())


def test_parameters_and_operations_count_it() -> None:
    plain = tiny_job(model__tie_word_embeddings=False).model
    more = plain.model_copy(update={"mtp_layers": 1})
    assert more.embedding_at_end
    specs, hidden = parameter_specs(more), plain.hidden_size
    added = {n: s for n, s in specs.items() if n not in parameter_specs(plain)}
    assert all(n.startswith("model.layers.2.") for n in added)
    block_size = sum(s.numel for n, s in specs.items() if n.startswith("model.layers.0."))
    assert sum(s.numel for s in added.values()) == block_size + 2 * hidden**2 + 3 * hidden
    head, attention = 6 * plain.vocabulary * hidden, 12 * plain.num_attention_heads * plain.head_size * 10
    products = 6 * (block_size - 2 * hidden + 2 * hidden**2)
    assert token_flops(more)(10) - token_flops(plain)(10) == head + products + attention


def test_the_last_part_of_a_pipeline_has_it_and_an_embedding() -> None:
    config = tiny_job(model__num_hidden_layers=6, model__tie_word_embeddings=False).model
    more = config.model_copy(update={"mtp_layers": 2})
    parts = cut_into_parts(more, 2, 48)
    assert parts[0].stop > cut_into_parts(config, 2, 48)[0].stop
    for name in parameter_specs(more):
        holders = [part.last for part in parts if part.holds(name, more.embedding_at_end)]
        assert holders == ([False, True] if "embed" in name else [holders[0]]), name
        assert holders[-1] or not name.startswith(("model.layers.6.", "model.layers.7."))
