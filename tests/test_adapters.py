"""Low-rank adapters: PEFT's rule, PEFT's files, weights that stay, and targets that are named wrongly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.checkpoint.huggingface import peft_tensors, write_adapter
from equigrad.checkpoint.state import read_tensors
from equigrad.cli import main
from equigrad.config.lora import Lora
from equigrad.data.stream import Stream
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.errors import UserError
from equigrad.models.decoder import Decoder
from equigrad.models.huggingface import peft_name, to_huggingface, to_peft
from equigrad.models.specs import adapted_weights, flops_per_token, is_adapter, parameter_count, parameter_specs
from equigrad.numerics.native import NativeOps
from equigrad.numerics.row import Row
from equigrad.optim.schedule import learning_rate
from equigrad.parallel.stop import StopRequest
from tests.jobs import make_trainer, mean_loss, summary, tiny_job, whole_parameters
from tests.models.test_decoder import build, make, reference


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ["all-linear"]},
        {"targets": ["q_proj", r"model\.layers\.1\.mlp\..*", "lm_head"], "rslora": True},
    ],
    ids=str,
)
def test_training_equals_peft(tmp_path: Path, lora: dict[str, Any]) -> None:
    """Three steps of ``transformers`` with ``peft``, samples one by one, with PyTorch's own AdamW."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    job = tiny_job(model__tie_word_embeddings=False, train__steps=3, lora={"rank": 4, "alpha": 6.0} | lora)
    assert job.lora is not None
    trainer = make_trainer(job, tmp_path / "a")
    raw = to_huggingface(job.model, None, None, "float32")
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw.pop("model_type"), **raw))
    ours = trainer.model.state_dict()
    hf.load_state_dict({n: t for n, t in ours.items() if not is_adapter(n)})
    config = LoraConfig(**to_peft(job.model, job.lora, None) | {"inference_mode": False})
    peft = get_peft_model(hf, config)
    theirs = {n.replace(".default", ""): p for n, p in peft.named_parameters() if p.requires_grad}
    assert theirs.keys() == {peft_name(n) for n in ours if is_adapter(n)}
    for name, parameter in theirs.items():
        parameter.data.copy_(ours[name.removeprefix("base_model.model.")])
    optimizer = torch.optim.AdamW(theirs.values(), betas=job.optim.betas, eps=job.optim.eps)
    stream = Stream(job.data, job.batch, job.seed, byte_tokenizer())
    for step in range(3):
        samples = [stream.read(ref) for ref in stream.next_batch().samples]
        loss = mean_loss(peft, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), job.optim.clip_norm)
        for group in optimizer.param_groups:
            group |= {"lr": learning_rate(job.optim, step, 3), "weight_decay": job.optim.weight_decay}
        optimizer.step()
        optimizer.zero_grad()
        record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    after = whole_parameters(trainer)
    for name, parameter in theirs.items():
        torch.testing.assert_close(after[name.removeprefix("base_model.model.")], parameter.data, rtol=0, atol=1e-5)
    assert all(torch.equal(after[n], t) for n, t in ours.items() if not is_adapter(n))


@pytest.fixture(scope="module", params=["qwen2", "qwen3-moe", "gpt-oss", "qwen3-next"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model ``base``, and a run of adapters for it of three steps, stopped once and resumed."""
    folder = tmp_path_factory.mktemp("adapted")
    model = build(make(request.param))
    wide = model.config.model_copy(update={"vocab_size": 257})
    model = build(wide)
    reference(wide, model).save_pretrained(folder / "base")
    byte_tokenizer().save(folder / "base")
    file = folder / "job.toml"
    file.write_text(f"""
model.weights = "{folder / "base"}"
train = {{ steps = 3 }}
data = {{ context = 48, held_out_every = 40 }}
batch = {{ tokens = 500, row_tokens = 96 }}
lora = {{ rank = 3, targets = ["q_proj", "down_proj", "lm_head"] }}
optim = {{ lr = 1e-2, schedule_steps = 3 }}
checkpoint = {{ every = 1, keep_last = 3 }}
observe = {{ report = false, sample_tokens = 0 }}
""")
    assert main(["train", str(file), "--run", str(folder / "whole")]) == 0
    assert main(["train", str(file), "--run", str(folder / "parts"), "--train.steps", "2"]) == 0
    assert main(["train", "--run", str(folder / "parts"), "--resume", "--train.steps", "3"]) == 0
    return folder


def test_a_run_of_adapters_goes_on_exactly_and_leaves_the_weights(adapted: Path) -> None:
    assert summary(adapted / "whole")["parameter_digest"] == summary(adapted / "parts")["parameter_digest"]
    first, last = (dict(read_tensors(adapted / f"whole/checkpoints/step-0000000{step}", "")) for step in (2, 3))
    changed = {n for n, t in last.items() if not torch.equal(first[n], t)}
    assert {n for n in changed if n.startswith("model.")} == {n for n in last if "lora_" in n and n[0] == "m"}
    assert {n.split(".", 2)[2] for n in last if n.startswith("optim.")} == {
        n.removeprefix("model.") for n in last if n.startswith("model.") and is_adapter(n)
    }


def test_exports_are_what_was_trained(adapted: Path, tmp_path: Path) -> None:
    """PEFT's files over the base, the merged weights in ``transformers``, and our own model give the same logits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from equigrad.commands.models import open_parts, own_job
    from equigrad.resolve import find_weights
    from tests.jobs import pool_world

    run = adapted / "whole"
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    weights = find_weights(run)
    job = own_job(weights)
    model = open_parts(weights, job, pool_world(job))[0]
    ids = torch.arange(40)
    with torch.no_grad():
        ours = model(ids, Row.of([40]))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids[None]).logits[0]
        base = AutoModelForCausalLM.from_pretrained(adapted / "base")
        plain = base(ids[None]).logits[0]
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids[None]).logits[0]
    assert (plain - ours).abs().max() > 1e-2
    torch.testing.assert_close(merged, ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


LAYERS_APART = [r".*\.0\..*\.(gate|up)_proj", r".*\.2\..*\.(down|up)_proj"]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "qwen3-next"])
@pytest.mark.parametrize(
    ("rslora", "targets"),
    [
        (False, ["gate_proj", "up_proj", "down_proj"]),
        (True, ["gate_proj", "up_proj", "down_proj", "q_proj"]),
        (False, ["experts.down_proj"]),
        (True, ["experts.gate_proj"]),
        (False, ["experts.up_proj", "experts.down_proj", "lm_head"]),
        (True, [*LAYERS_APART, "all-linear"]),
    ],
    ids=str,
)
def test_peft_reads_adapters_of_experts(tmp_path: Path, name: str, rslora: bool, targets: list[str]) -> None:
    """It has gate and up as one, and some layers with adapters for both, some for one."""
    from peft import PeftModel

    config, lora = make(name), Lora(rank=3, alpha=7.0, rslora=rslora, targets=targets)
    plain = build(config)
    model = Decoder(config, NativeOps(), "cpu", lora=lora)
    model.load_state_dict(plain.state_dict(), strict=False)
    adapters = {n: p for n, p in model.state_dict().items() if is_adapter(n)}
    generator = torch.Generator().manual_seed(5)
    for matrix in adapters.values():
        matrix.normal_(std=0.1, generator=generator)
    write_adapter(tmp_path / "adapter", to_peft(config, lora, None), peft_tensors(adapters, config, lora))
    ids = torch.arange(40)
    with torch.no_grad():
        ours = model(ids, Row.of([40]))
        theirs = PeftModel.from_pretrained(reference(config, plain), tmp_path / "adapter")
        assert sum(p.numel() for n, p in theirs.named_parameters() if "lora_" in n) >= sum(
            matrix.numel() for matrix in adapters.values()
        )
        torch.testing.assert_close(theirs(ids[None]).logits[0], ours, rtol=0, atol=2e-5)
        torch.testing.assert_close(theirs.merge_and_unload()(ids[None]).logits[0], ours, rtol=0, atol=2e-5)
        assert (ours - plain(ids, Row.of([40]))).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "experts", "message"),
    [("gpt-oss", {"num_experts": 1, "num_experts_per_tok": 1}, "merged"),
     ("qwen3-moe", {"scoring_func": "sigmoid"}, "has no experts.scoring_func = sigmoid")],
)  # fmt: skip
def test_what_peft_or_the_family_cannot_express_is_not_exported(
    name: str, experts: dict[str, Any], message: str
) -> None:
    config = make(name)
    assert config.experts is not None
    config = config.model_copy(update={"experts": config.experts.model_copy(update=experts)})
    with pytest.raises(UserError, match=message):
        to_peft(config, Lora(targets=["down_proj"]), None)


def test_weights_with_adapters_start_only_what_has_the_same(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from equigrad.resolve import resolve_weights

    job = tiny_job(model={"weights": str(adapted / "whole")})
    with pytest.raises(UserError, match="holds adapters, and the job has others or none"):
        resolve_weights(job)
    assert main(["export", str(adapted / "base"), str(tmp_path / "x"), "--adapter"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    same = Lora(rank=3, targets=["q_proj", "down_proj", "lm_head"])
    assert resolve_weights(job.model_copy(update={"lora": same})).lora == same


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        ("llama", "qproj", "'qproj' is no layer of this model; adapters are for q_proj, k_proj"),
        ("llama", "embed_tokens", "names model.embed_tokens, one of those layers that take no adapter"),
        ("llama-tied-biased", "lm_head", "the head is the embedding here"),
        ("qwen3-moe", r".*mlp\.gate", "names model.layers.0.mlp.gate, one of those"),
        ("qwen3-next", "q_conv1d", "q_conv1d, one of those layers that take no adapter"),
        ("qwen3-next", r".*\.linear_attn\.[a-z_]*proj.*|.*_conv1d", "layers.0.linear_attn.k_conv1d, one of those"),
        ("llama", "(", "no name and no regular expression"),
    ],
)
def test_what_is_no_target_is_named(model: str, target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parameter_specs(make(model), Lora(targets=["all-linear", target]))


def test_targets_mean_what_they_mean_in_peft() -> None:
    specs = parameter_specs(make("llama"))

    def adapted(*targets: str) -> set[str]:
        return {n.removesuffix(".weight") for n in adapted_weights(specs, Lora(targets=list(targets)))}

    assert adapted("self_attn.q_proj") == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}
    assert adapted("model.layers.0.mlp.up_proj") == {"model.layers.0.mlp.up_proj"}
    assert adapted(r".*layers\.[01]\..*k_proj") == {f"model.layers.{i}.self_attn.k_proj" for i in (0, 1)}
    assert len(adapted("all-linear")) == 3 * 7
    specs = parameter_specs(make("qwen3-next"))  # layer 1 dense, the others with routed experts and a shared one
    at = [f"model.layers.{i}.mlp.{part}.up_proj" for i in (0, 2) for part in ("experts", "shared_expert")]
    assert adapted("experts.up_proj") == {at[0], at[2]}
    assert adapted(r".*\.shared_expert\..*(up)_proj") == {at[1], at[3]}
    assert adapted("up_proj") == {*at, "model.layers.1.mlp.up_proj"}
    assert not any(".experts." in name for name in adapted("all-linear"))
    assert Lora(rank=4, alpha=8.0).scale == 2.0
    assert Lora(rank=4, alpha=8.0, rslora=True).scale == 4.0


def test_frozen_weights_cost_two_thirds() -> None:
    config, lora = make("llama"), Lora(rank=2, targets=["q_proj"])
    adapters = 3 * 2 * (48 + 48)
    assert parameter_count(config, lora) - parameter_count(config) == adapters
    assert parameter_count(config, lora, trained=True) == adapters
    products = parameter_count(config) - 97 * 48 - 7 * 48  # neither embedding nor norms
    assert flops_per_token(config, 0.0, lora) == 4 * products + 6 * adapters
