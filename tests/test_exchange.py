"""Models go from Hugging Face folders into runs and back and arrive bit for bit; `transformers` takes what we write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.cli import main

SHAPE = {
    "vocab_size": 10_000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_scaling": LLAMA3},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 windowed": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
}


@pytest.fixture(params=CASES, ids=lambda name: name)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPE | CASES[request.param]


def save(config: dict[str, Any], folder: Path, dtype: torch.dtype, shards: str) -> Path:
    """A randomly initialised model of `transformers`, biases and norms included, as it saves one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k != "model_type"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.arange(60).reshape(2, 30) * 83 % 10_000).logits


def digests(path: Path, tmp_path: Path) -> list[str]:
    assert main(["info", str(path), "--json", str(tmp_path / "info.json")]) == 0
    found = json.loads((tmp_path / "info.json").read_text())
    return (
        [c["parameter_digest"] for c in found["checkpoints"]] if "checkpoints" in found else [found["parameter_digest"]]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", ["5GB", "600KB"], ids=["one file", "sharded"])
def test_weights_survive_import_and_export_bit_for_bit(
    config: dict[str, Any], dtype: torch.dtype, shards: str, tmp_path: Path
) -> None:
    theirs = save(config, tmp_path / "theirs", dtype, shards)
    run, ours = tmp_path / "run", tmp_path / "ours"
    assert main(["import", str(theirs), str(run)]) == 0
    assert main(["export", str(run), str(ours), "--shard-mb", "1" if shards != "5GB" else "5000"]) == 0
    assert (ours / "model.safetensors.index.json").exists() == (shards != "5GB")
    before, after = tensors(theirs), tensors(ours)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name
    assert torch.equal(logits(theirs), logits(ours))
    assert digests(theirs, tmp_path) == digests(run, tmp_path) == digests(ours, tmp_path)


def test_the_configuration_survives_import_and_export(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs = save(config, tmp_path / "theirs", torch.float32, "5GB")
    run, ours = tmp_path / "run", tmp_path / "ours"
    assert main(["import", str(theirs), str(run)]) == 0
    assert main(["export", str(run), str(ours)]) == 0
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (theirs, ours))
    without_meaning = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_name_or_path"}
    if not config.get("use_sliding_window"):
        without_meaning.add("max_window_layers")
    differ = {key: (before[key], after.get(key)) for key in before if before[key] != after.get(key)}
    assert differ.keys() <= without_meaning, differ


def test_an_export_in_another_type_is_the_rounded_model(tmp_path: Path) -> None:
    theirs = save(SHAPE | CASES["qwen3"], tmp_path / "theirs", torch.float32, "5GB")
    ours = tmp_path / "ours"
    assert main(["export", str(theirs), str(ours), "--dtype", "bfloat16"]) == 0
    after = tensors(ours)
    for name, value in tensors(theirs).items():
        assert torch.equal(value.to(torch.bfloat16), after[name]), name
    assert json.loads((ours / "config.json").read_text())["dtype"] == "bfloat16"
