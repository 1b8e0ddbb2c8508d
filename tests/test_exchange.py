"""Import and export: bit for bit, loadable by ``transformers``; eval and generate agree with it."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from equigrad.data.tokenizers import byte_tokenizer
from tests.jobs import command, inside, make_trainer, summary, tiny_job, whole_parameters, write_job
from tests.models.test_decoder import MODELS, build, make, reference


def ok(*words: str | Path) -> str:
    """What the command prints; it runs in this process where it starts no others."""
    if "--layout.dp_shard" not in words:
        return inside(*words)
    done = command(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen2-window", torch.bfloat16),
                                             ("qwen3", torch.float32), ("llama-llama3", torch.float16),
                                             ("qwen3-moe", torch.bfloat16), ("gpt-oss", torch.bfloat16),
                                             ("gpt-oss-other", torch.float32), ("qwen3-next", torch.bfloat16),
                                             ("qwen3-next-dense", torch.float32)])  # fmt: skip
def test_weights_and_logits_survive_the_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from equigrad.checkpoint.huggingface import model_tensors
    from equigrad.cli import main
    from equigrad.resolve import find_weights

    model = build(make(name))
    reference(model.config, model).to(dtype).save_pretrained(tmp_path / "in", max_shard_size="30KB")
    byte_tokenizer().save(tmp_path / "in")
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = all_tensors(tmp_path / "in"), all_tensors(tmp_path / "out")
    if model.config.tie_word_embeddings:
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype == dtype
        assert torch.equal(before[key], after[key])
    imported, read = (dict(model_tensors(find_weights(tmp_path / d))) for d in ("run", "in"))
    assert imported.keys() == read.keys() == model.state_dict().keys()
    for key in read:
        assert read[key].dtype == dtype
        assert torch.equal(read[key].float(), imported[key])
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / d, dtype=torch.float32) for d in ("in", "out"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("Ahab") == [256, 65, 104, 97, 98]


def test_exports_in_several_files(tmp_path: Path) -> None:
    from equigrad.checkpoint.huggingface import huggingface_tensors, weight_files, write_huggingface

    tensors = {f"w{i}": torch.randn(10, 10) for i in range(5)}
    write_huggingface(tmp_path / "out", {"model_type": "llama"}, tensors.items(), 900)
    files = {p.name for p in weight_files(tmp_path / "out").values()}
    assert files == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert all(torch.equal(t, tensors[n]) for n, t in huggingface_tensors(tmp_path / "out", tensors))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained")
    job = tiny_job(train__steps=6, observe__tensorboard=True, train__eval_every=3)
    ok("train", write_job(job, folder / "job.toml"), "--run", folder / "run")
    return folder / "run"


def test_a_run_leaves_what_it_promises(trained: Path) -> None:
    kept = summary(trained)
    assert kept["steps"] == 6
    assert kept["tokens"] > 0
    assert kept["held_out_bits_per_byte"] == pytest.approx(kept["held_out_loss"] / math.log(2), rel=1e-2)
    for name in ("job.toml", "tokenizer/tokenizer.json", "metrics.jsonl", "report.html", "sample.json"):
        assert (trained / name).stat().st_size
    assert list((trained / "tensorboard").iterdir())
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if r["kind"] == "eval"] == [3, 6]
    assert all(r["tokens"] == r["executed_tokens"] for r in records if r["kind"] == "step")


def test_eval_agrees_with_training_and_with_transformers(trained: Path, tmp_path: Path) -> None:
    """Held-out loss of the run = of its checkpoint = of its export = of ``transformers``, token-weighted."""
    from transformers import AutoModelForCausalLM

    from equigrad.data.stream import Stream
    from equigrad.run import Run

    ok("export", trained, tmp_path / "hf")
    results = []
    for words in ([trained], [trained / "checkpoints/step-00000006"],
                  [tmp_path / "hf", "--job", trained / "job.toml"], [trained, "--layout.dp_shard", "2"]):  # fmt: skip
        ok("eval", *words, "--json", tmp_path / "result.json")
        results.append(json.loads((tmp_path / "result.json").read_text()))
    for result in results:
        assert result["held_out_loss"] == pytest.approx(summary(trained)["held_out_loss"], rel=1e-6)
        assert result["held_out_bits_per_byte"] == pytest.approx(summary(trained)["held_out_bits_per_byte"], rel=1e-6)
    job = Run(trained).job()
    stream = Stream(job.data, job.batch, job.seed, byte_tokenizer())
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    total = tokens = 0.0
    with torch.no_grad():
        for ref in stream.held_out().samples:
            sample = stream.read(ref)
            logits = hf(torch.from_numpy(sample.ids.astype("int64"))[None]).logits[0]
            labels = torch.from_numpy(sample.labels.astype("int64"))
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            tokens += len(labels)
    assert results[0]["tokens"] == tokens
    assert results[0]["held_out_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_generate_is_greedy_like_transformers_and_the_same_in_a_batch(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ok("export", trained, tmp_path / "hf")
    words = ["--max-tokens", "12", "--temperature", "0", "--json", tmp_path / "out.json"]
    ok("generate", trained, "--prompt", "Call me", "--prompt", "The whale, the whale", *words)
    both = json.loads((tmp_path / "out.json").read_text())
    ok("generate", tmp_path / "hf", "--prompt", "Call me", *words)
    assert json.loads((tmp_path / "out.json").read_text()) == both[:1]
    hf, tokenizer = (c.from_pretrained(tmp_path / "hf") for c in (AutoModelForCausalLM, AutoTokenizer))
    assert hf.generation_config.eos_token_id == [256]
    prompt = tokenizer("Call me", return_tensors="pt")
    theirs = hf.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=256)
    assert both[0]["text"] == tokenizer.decode(theirs[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)


def test_warm_start_takes_weights_alone_from_any_kind_of_folder(trained: Path, tmp_path: Path) -> None:
    ok("export", trained, tmp_path / "hf")
    wanted = summary(trained)["parameter_digest"]
    for number, source in enumerate((trained, trained / "checkpoints/step-00000006", tmp_path / "hf")):
        job = tmp_path / f"warm{number}.toml"
        job.write_text(f'model.weights = "{source}"\n[train]\nsteps = 0\n[data]\ncontext = 32\n'
                       "[observe]\nsample_tokens = 0\n")  # fmt: skip
        ok("train", job, "--run", tmp_path / f"warm{number}")
        assert summary(tmp_path / f"warm{number}")["parameter_digest"] == wanted
    shutil.rmtree(tmp_path / "hf")  # a started run stands on its own
    ok("train", "--run", tmp_path / "warm2", "--resume", "--train.steps", "1")


def test_info_tells_the_same_digest_however_the_run_was_sharded(tmp_path: Path) -> None:
    digests = set()
    for ranks in (1, 2):
        job = tiny_job(train__steps=0, observe__sample_tokens=0)
        words = ["--layout.dp_shard", str(ranks)] if ranks > 1 else []
        ok("train", write_job(job, tmp_path / "job.toml"), "--run", tmp_path / f"run{ranks}", *words)
        ok("info", tmp_path / f"run{ranks}", "--json", tmp_path / "info.json")
        info = json.loads((tmp_path / "info.json").read_text())
        digests |= {info["checkpoints"][0]["parameter_digest"], info["summary"]["parameter_digest"]}
    ok("export", tmp_path / "run2", tmp_path / "hf")
    ok("info", tmp_path / "hf", "--json", tmp_path / "info.json")
    digests.add(json.loads((tmp_path / "info.json").read_text())["parameter_digest"])
    assert len(digests) == 1


def test_info_prints_aligned_words_and_no_python(capsys: pytest.CaptureFixture[str]) -> None:
    from equigrad.commands.info import _show

    summary = {"held_out_bits_per_byte": 2.5, "steps": 1000}
    _show({"finished": True, "summary": summary, "sizes": ["a", "b"], "nothing": None})
    assert capsys.readouterr().out.splitlines() == [
        "finished                  yes",
        "summary",
        "  held out bits per byte  2.5",
        "  steps                   1,000",
        "sizes                     a, b",
    ]


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "truncated", "no weights", "family"])
def test_bad_model_folders_are_refused_with_one_message(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from equigrad.cli import main

    model = build(make("llama"))
    folder = tmp_path / "hf"
    reference(model.config, model).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    if damage == "missing":
        tensors.pop("model.norm.weight")
    elif damage == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if damage == "no weights":
        file.unlink()
    if damage == "family":
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
        (folder / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("equigrad: error: ")
    assert str(folder) in error
    assert not (tmp_path / "run" / "job.toml").exists()


def test_every_family_exports(tmp_path: Path) -> None:
    from equigrad.models.huggingface import to_huggingface

    assert {to_huggingface(make(n), 1, 2, "float32")["model_type"] for n in MODELS} == {
        "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss",
    }  # fmt: skip


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_quantised_weights_are_refused(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    from equigrad.cli import main

    config = {"model_type": family, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["import", str(tmp_path), str(tmp_path / "run")]) == 2
    assert "the weights are quantised (mxfp4)" in capsys.readouterr().err


def test_a_published_gpt_oss_configuration_is_understood() -> None:
    """The keys of openai/gpt-oss-20b, less the quantisation; and what a file may leave out."""
    from equigrad.models.huggingface import from_huggingface
    from equigrad.models.specs import parameter_count

    kinds = ["sliding_attention", "full_attention"] * 12
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False}  # fmt: skip
    raw = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_scaling": rope,
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    model = from_huggingface(raw, "config.json")
    assert parameter_count(model) == 20_914_757_184
    assert [model.window(i) for i in range(4)] == [128, None, 128, None]
    assert model.experts is not None
    assert (model.experts.num_experts, model.experts.router_aux_loss_coef) == (32, 0.0)
    implied = ("attention_bias", "head_dim", "layer_types", "max_position_embeddings", "rope_scaling", "rope_theta",
               "sliding_window", "swiglu_limit", "num_experts_per_tok", "rms_norm_eps")  # fmt: skip
    assert from_huggingface({k: v for k, v in raw.items() if k not in implied}, "config.json") == model
    balanced = from_huggingface(raw | {"output_router_logits": True}, "config.json")
    assert balanced.experts is not None
    assert balanced.experts.router_aux_loss_coef == 0.9


def test_a_published_qwen3_next_configuration_is_understood() -> None:
    """The keys of Qwen/Qwen3-Next-80B-A3B-Instruct, with a rule for its layers; and what a file may leave out."""
    from equigrad.config import load_job
    from equigrad.errors import UserError
    from equigrad.models.huggingface import from_huggingface

    raw = {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    model = from_huggingface(raw, "config.json")
    preset = load_job(Path(__file__).parents[1] / "configs/qwen3-next-80b-a3b.toml").model
    assert model.experts is not None
    assert model.experts.router_aux_loss_coef == 0  # which the file names but does not use
    balanced = from_huggingface(raw | {"output_router_logits": True}, "config.json")
    assert balanced == preset
    assert [layer for layer in range(48) if not model.is_linear(layer)] == list(range(3, 48, 4))
    assert model.rotary_size == 64
    implied = ("full_attention_interval", "head_dim", "linear_key_head_dim", "linear_num_value_heads", "num_experts",
               "norm_topk_prob", "num_key_value_heads", "partial_rotary_factor", "rms_norm_eps",
               "shared_expert_intermediate_size", "linear_conv_kernel_dim")  # fmt: skip
    assert from_huggingface({k: v for k, v in raw.items() if k not in implied}, "config.json") == model
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    other = from_huggingface(raw | {"num_hidden_layers": 4, "layer_types": kinds}, "config.json")
    assert [other.is_linear(layer) for layer in range(4)] == [True, False, False, True]
    for wrong in (kinds[:2], ["sliding_attention", *kinds[1:]]):
        with pytest.raises(UserError, match="do not make 4 layers of a Qwen3-Next"):
            from_huggingface(raw | {"num_hidden_layers": 4, "layer_types": wrong}, "config.json")


def test_modules_for_multi_token_prediction_of_a_qwen3_next_are_left_out(tmp_path: Path) -> None:
    from equigrad.cli import main

    model = build(make("qwen3-next"))
    reference(model.config, model).save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 0


def test_a_kernel_of_another_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from equigrad.cli import main

    model = build(make("qwen3-next"))
    reference(model.config, model).save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    tensors, name = load_file(file), "model.layers.0.linear_attn.conv1d.weight"
    save_file(tensors | {name: torch.cat([tensors[name], tensors[name][:1]])}, file, metadata={"format": "pt"})
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    assert f"{name} has shape (81, 1, 4), of which the model needs (80, 1, 4)" in capsys.readouterr().err


def test_mixed_types_survive_the_round_trip(tmp_path: Path) -> None:
    from equigrad.cli import main

    model = build(make("llama"))
    folder = tmp_path / "in"
    reference(model.config, model).save_pretrained(folder)
    tensors = {k: v if v.ndim == 1 else v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    after = all_tensors(tmp_path / "out")
    assert all(after[k].dtype == v.dtype and torch.equal(after[k], v) for k, v in tensors.items())
    assert main(["generate", str(tmp_path / "out"), "--prompt", "x"]) == 2  # no tokenizer there


def test_a_small_model_generates_and_warm_starts_without_a_job_file(tmp_path: Path, trained: Path) -> None:
    ok("export", trained, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"max_position_embeddings": 64}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    ok("generate", tmp_path / "hf", "--prompt", "Call", "--max-tokens", "5")
    words = ["--data.context", "32", "--train.steps", "1", "--observe.sample_tokens", "0"]
    ok("train", "--model.weights", tmp_path / "hf", "--run", tmp_path / "run", *words)
    (tmp_path / "hf/tokenizer.json").unlink()
    done = command("train", "--model.weights", tmp_path / "hf", "--run", tmp_path / "other", *words)
    assert done.returncode == 2
    assert "has no tokenizer.json" in done.stderr


def _weights_on_a_layout(folder: Path, layout: dict[str, int]) -> dict[str, torch.Tensor]:
    from equigrad.checkpoint.huggingface import load_weights
    from equigrad.resolve import find_weights

    weights = find_weights(folder)
    shape = weights.model.model_dump(exclude_none=True)
    trainer = make_trainer(tiny_job(model=shape, layout=layout), folder / "run")
    load_weights(weights, trainer.parameters)
    return whole_parameters(trainer)


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "ep": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "qwen3-next"])
def test_each_rank_reads_its_part_of_what_is_stored_otherwise(
    workers: Any, tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    model = build(make(name))
    reference(model.config, model).save_pretrained(tmp_path, max_shard_size="30KB")
    for parameters in workers(4).run(_weights_on_a_layout, tmp_path, layout):
        assert parameters.keys() == model.state_dict().keys()
        assert all(torch.equal(parameters[n], t) for n, t in model.state_dict().items())


def test_a_given_model_is_balanced_as_the_job_says(tmp_path: Path) -> None:
    from equigrad.config.load import make_job
    from equigrad.errors import UserError
    from equigrad.resolve import resolve_weights

    model = build(make("qwen3-moe"))
    reference(model.config, model).save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)

    def resolved(**experts: Any) -> Any:
        tree = {"model": {"weights": str(tmp_path), "experts": experts}, "data": {"context": 64}}
        return resolve_weights(make_job(tree, "test")).model

    assert resolved(router_aux_loss_coef=0.5).experts.router_aux_loss_coef == 0.5
    assert resolved(router_aux_loss_coef=0.5).experts.num_experts == 8
    assert resolved(num_experts=8).experts == model.config.experts
    with pytest.raises(UserError, match=r"model\.experts\.num_experts is 4, but .* has 8"):
        resolved(num_experts=4)


@pytest.mark.parametrize("changes", [{"router_bias_update_rate": 0.1}, {"shared_expert_intermediate_size": 8}], ids=str)
def test_experts_that_the_family_lacks_are_not_exported(changes: dict[str, Any]) -> None:
    from equigrad.errors import UserError
    from equigrad.models.huggingface import to_huggingface

    config = make("qwen3-moe")
    assert config.experts is not None
    config = config.model_copy(update={"experts": config.experts.model_copy(update=changes)})
    with pytest.raises(UserError, match=next(iter(changes))):
        to_huggingface(config, None, None, "float32")
    with pytest.raises(UserError, match="has no experts"):
        to_huggingface(config.model_copy(update={"family": "qwen3"}), None, None, "float32")


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("qwen3-next", {"family": "qwen3_moe"}, "attn_output_gate = True, .*partial_rotary_factor = 0.25, linear_att"),
        ("qwen3-next", {"linear_attention": None}, "model without linear_attention"),
        ("qwen3-next", {"zero_centred_norm": False}, "zero_centred_norm = False"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_recurrent_states_and_what_goes_with_them_belong_to_qwen3_next(
    name: str, changes: dict[str, Any], complaint: str
) -> None:
    from equigrad.errors import UserError
    from equigrad.models.huggingface import to_huggingface

    with pytest.raises(UserError, match=complaint):
        to_huggingface(make(name).model_copy(update=changes), None, None, "float32")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_sinks_and_biased_experts_belong_to_gpt_oss(name: str) -> None:
    from equigrad.errors import UserError
    from equigrad.models.huggingface import to_huggingface

    other = make(name)
    with pytest.raises(UserError, match="attention_sinks = True"):
        to_huggingface(other.model_copy(update={"attention_sinks": True}), None, None, "float32")
    with pytest.raises(UserError, match="attention_sinks = False"):
        to_huggingface(other.model_copy(update={"family": "gpt_oss"}), None, None, "float32")
    if other.experts is not None:
        biased = other.experts.model_copy(update={"bias": True, "activation": "clamped_swiglu"})
        with pytest.raises(UserError, match=r"experts\.bias = True, experts\.activation = clamped_swiglu"):
            to_huggingface(other.model_copy(update={"experts": biased}), None, None, "float32")


@pytest.mark.parametrize(
    "wrong",
    [{"layer_types": 5}, {"layer_types": [[1]] * 4}, {"rope_parameters": 5}, {"rope_parameters": {"rope_theta": "x"}},
     {"quantization_config": "fp8"}, {"model_type": ["a"]}],
    ids=str,
)  # fmt: skip
def test_values_of_another_kind_are_told_and_not_raised(tmp_path: Path, wrong: dict[str, Any]) -> None:
    from equigrad.errors import UserError
    from equigrad.models.huggingface import read_config, to_huggingface

    raw = to_huggingface(make("qwen3-next"), None, None, "float32") | wrong
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("kind", [torch.int64, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: torch.dtype
) -> None:
    from equigrad.cli import main

    model = build(make("llama"))
    reference(model.config, model).save_pretrained(tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    damaged = load_file(file)
    damaged["model.norm.weight"] = damaged["model.norm.weight"].to(kind)
    save_file(damaged, file, metadata={"format": "pt"})
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    assert "model.norm.weight is stored as" in capsys.readouterr().err
