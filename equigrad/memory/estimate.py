"""How much memory one rank of a job will need, from its configuration alone. Torch-free; an estimate, not a promise."""

from dataclasses import dataclass

from equigrad.config.job import Job
from equigrad.config.model import Model
from equigrad.models.specs import parameter_count, parameter_specs

_OPTIMIZER_BYTES = {"adamw": 8}


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank, by use."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def estimate(job: Job) -> Estimate:
    """The peak: all state, and the saved activations of one full row at the end of its forward pass.

    Float32 parameters, gradients and moments are sharded over dp_shard. While sharded, gradients that are reduced once
    a step are whole, and so are gathered parameters: all of them, or, where they are freed after the forward pass, the
    embedding and head and two blocks.
    """
    model, shards = job.model, job.layout.dp_shard
    count, trained = (parameter_count(model, job.lora, only) for only in (False, True))
    tokens = job.batch.row_tokens
    low = 2 if job.numerics.dtype == "bfloat16" else 4
    # Per token and block: residual stream at both norms (float32) and outputs of both norms (compute type); and what
    # attention or the gated delta rule, and the feed-forward part, keep.
    layers = model.all_layers
    block = (4 + low) * 2 * model.hidden_size
    block += sum(_mixer_bytes(model, layer, low) + _feed_bytes(model, layer, low) for layer in range(layers)) // layers
    kept = layers
    if job.memory.recompute == "block":
        recomputed = -(-layers // job.memory.recompute_every)
        kept = layers - recomputed + 1  # one block at a time is alive in full
        activations = tokens * (kept * block + recomputed * 4 * model.hidden_size)
    else:
        activations = tokens * kept * block
    logits = min(4 * tokens * model.vocabulary, job.memory.saved_logits_mb << 20) * (1 + model.mtp_layers)
    sharded = -(-count // shards)
    # Gathered, a rank has its share of the experts.
    specs = {name: spec for name, spec in parameter_specs(model, job.lora).items() if spec.role != "state"}
    sizes = {name: -(-s.numel // job.layout.ep) if s.expert else s.numel for name, s in specs.items()}
    here = sum(sizes.values())
    own = -(-trained // shards)
    whole = sum(sizes[n] for n, s in specs.items() if s.trained) if not job.layout.reduce_every_round else own
    gathered = 0
    if job.layout.data_lanes > 1:  # gathered parameters are a second copy even where there is one shard
        in_blocks = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
        kept_blocks = 2 if job.layout.reshard_after_forward else layers
        gathered = here - in_blocks + in_blocks * min(kept_blocks, layers) // layers
    optimizer = _OPTIMIZER_BYTES[job.optim.name] * own
    return Estimate(4 * (sharded + gathered), 4 * whole, optimizer, activations, logits)


def _mixer_bytes(model: Model, layer: int, low: int) -> int:
    """Saved per token by a layer's attention or gated delta rule; ``low``: bytes of the compute type."""
    linear = model.linear_attention
    if linear is not None and model.is_linear(layer):
        # Queries, keys, values, gates and rates as they were projected, what is read from the states, and that gated;
        # and of 64 tokens the first state (float32).
        keys = linear.linear_num_key_heads * linear.linear_key_head_dim
        values = linear.linear_num_value_heads * linear.linear_value_head_dim
        states = 4 * values * linear.linear_key_head_dim // 64
        return low * (2 * keys + 4 * values + 2 * linear.linear_num_value_heads) + states
    # Rotated q and k, v, the attention output; what enters the norms of q and k; the gate, and the output gated.
    queries, keys = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    return low * ((2 + model.qk_norm) * (queries + keys) + 2 * model.attn_output_gate * queries)


def _feed_bytes(model: Model, layer: int, low: int) -> int:
    """Saved per token by a layer's feed-forward part; ``low``: bytes of the compute type."""
    if not model.is_sparse(layer) or model.experts is None:
        return low * 3 * model.intermediate_size  # gate, up and their product
    experts = model.experts
    # Scores; for each choice what comes in, gate, up, their product and what goes out, and where it is (int64).
    copies = low * (2 * model.hidden_size + 3 * experts.moe_intermediate_size) + 3 * 8
    shared = low * (3 * experts.shared_expert_intermediate_size + experts.shared_expert_gate * model.hidden_size)
    return 4 * experts.num_experts + experts.num_experts_per_tok * copies + shared
