"""How much memory one rank of a job will need, from its configuration alone. Torch-free; an estimate, not a promise."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from equigrad.config.job import Job
from equigrad.config.model import Model
from equigrad.config.optim import Optim
from equigrad.models.parts import Part, cut_into_parts
from equigrad.models.specs import Spec, parameter_specs
from equigrad.numerics.budget import PIECE_ENTRIES, WAVE_ENTRIES, WORKING_BYTES, delta_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank, by use."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def estimate(job: Job, alive: Sequence[int] = (1,)) -> Estimate:
    """The peak on the pipeline rank that needs most: all state, and the activations that wait for a backward pass.

    alive: of each pipeline rank, how many rows of a stage it holds at one time (``schedule.pipeline.simulate``)

    Float32 parameters, gradients and moments (in exact numerics the first two are float64) are sharded over dp_shard
    and cp. While sharded, gradients that are
    reduced once a step are whole, and so are gathered parameters: all of them, or, where they are freed after the
    forward pass, the embedding and head and two blocks.
    """
    layout, specs = job.layout, parameter_specs(job.model, job.lora)
    parts = cut_into_parts(job.model, layout.pp * layout.pp_stages, job.data.context)
    ranks = (_of_rank(job, specs, parts[rank :: layout.pp], rows) for rank, rows in enumerate(alive))
    return max(ranks, key=lambda rank: rank.total)


def _of_rank(job: Job, specs: Mapping[str, Spec], parts: Sequence[Part], rows: int) -> Estimate:
    """On a rank with these parts that holds so many rows at one time."""
    layout, both = job.layout, job.model.embedding_at_end
    own = {n: s for n, s in specs.items() if s.role != "state" for part in parts if part.holds(n, both)}
    # As a rank computes with them, gathered, and as it keeps them.
    here = {n: -(-s.numel // ((layout.tp if s.tensor else 1) * (layout.ep if s.expert else 1))) for n, s in own.items()}
    shards = layout.dp_shard * layout.cp
    kept = {n: -(-size // (shards // layout.ep if own[n].expert else shards)) for n, size in here.items()}
    gathered = 0
    if layout.data_lanes * layout.cp > 1:  # a second copy, even where there is one shard
        in_blocks = sum(size for name, size in here.items() if name.startswith("model.layers."))
        blocks = sum(part.stop - part.start for part in parts) + job.model.mtp_layers * parts[-1].last
        # A pipeline keeps its stages gathered from the first row to the last.
        whole_blocks = 2 if layout.reshard_after_forward and layout.pp == 1 else blocks
        gathered = sum(here.values()) - in_blocks + in_blocks * min(whole_blocks, blocks) // blocks
    gradients = kept if layout.reduce_every_round else here
    trained = [n for n, s in own.items() if s.trained]
    wide = 8 if job.numerics.kind == "exact" else 4
    activations = max(_activations(job, part, rows) for part in parts)
    logits = _logits(job, rows) if parts[-1].last else 0
    # When the update is made, the activations are gone.
    matrices = {n: own[n] for n in trained if own[n].is_matrix}
    rest = [kept[n] for n in trained if n not in matrices]
    update = max(_orthogonal(job, matrices, kept), _equalized(job, rest)) - activations - logits
    return Estimate(
        parameters=wide * (sum(kept.values()) + gathered),
        gradients=wide * sum(gradients[n] for n in trained),
        optimizer=sum(kept[n] * moments(job.optim, own[n]) for n in trained) * 4,
        activations=activations,
        logits=logits,
        working=max(update, *(_working(job, part) for part in parts)),
    )


def moments(optim: Optim, spec: Spec) -> int:
    """How many float32 numbers a rule keeps for each entry of a parameter; NorMuon's, one a row, are not counted."""
    two = optim.name == "adamw" or (optim.name not in ("lion", "meqmuon") and not spec.is_matrix)
    return 2 if two else 1


def _orthogonal(job: Job, matrices: Mapping[str, Spec], kept: Mapping[str, int]) -> int:
    """What it takes to make a stage's matrices, of each of which a rank has so many entries, orthogonal: what
    ``optim.exchange`` has in memory at one time."""
    if not job.optim.orthogonal or not matrices:
        return 0
    exact, ranks = job.numerics.kind == "exact", job.layout.world_size // job.layout.pp
    size = 2 if job.numerics.dtype == "bfloat16" and not exact else 4
    largest = max(s.shape[-2] * s.shape[-1] for s in matrices.values())
    of_rank, here = -(-sum(s.numel for s in matrices.values()) // ranks), sum(kept[name] for name in matrices)
    wave, part = (min(entries, max(WAVE_ENTRIES, largest)) for entries in (of_rank, here))
    at_once = min(wave, max(WAVE_ENTRIES // 4, largest))
    # Parts of three waves, whole matrices of two, messages there and back, in and out; and what is made on the way.
    parts = 4 * max(3 * part, max(kept[name] for name in matrices))
    messages = 4 * max(wave, part) * size if ranks > 1 else 0
    # NorMuon and MeqMuon go on in float32 where matrices are bfloat16.
    widest = 4 if job.optim.name in ("normuon", "meqmuon") else size
    return parts + 2 * wave * size + messages + at_once * (60 if exact else 5 * widest)


def _equalized(job: Job, rest: Sequence[int]) -> int:
    """What MeqMuon takes for parameters that are no hidden matrices, of each of which a rank has so many entries:
    updates of all of them, and in float64 the squares of one, and a piece of what is made of it on the way."""
    if job.optim.name != "meqmuon" or not rest:
        return 0
    on_the_way = 40 if job.numerics.kind == "exact" else 16
    return 4 * sum(rest) + 8 * max(rest) + on_the_way * min(max(rest), PIECE_ENTRIES)


def _activations(job: Job, part: Part, rows: int) -> int:
    """What so many full rows leave behind in a part of the model."""
    model, memory = job.model, job.memory
    tokens = -(-job.batch.row_tokens // job.layout.cp)
    blocks = range(part.start, model.all_layers if part.last else part.stop)
    saved = sum(_block_bytes(job, layer) for layer in blocks)
    # Where weight gradients come later, what they need of a block that was computed again is kept until then.
    if memory.recompute == "none" or (job.layout.pp > 1 and job.layout.pp_schedule == "zero_bubble"):
        return rows * tokens * saved
    again = [layer for number, layer in enumerate(blocks) if number % memory.recompute_every == 0]
    recomputed = sum(_block_bytes(job, layer) for layer in again)
    inputs = len(again) * 4 * model.hidden_size // job.layout.tp
    alive = max(_block_bytes(job, layer) for layer in again)  # one block at a time, of one row
    return tokens * (rows * (saved - recomputed + inputs) + alive)


def _working(job: Job, part: Part) -> int:
    """What the gated delta rule takes while it computes a row, some of its key heads at a time; in exact numerics also
    what attention keeps between the two parts of its backward pass."""
    linear, layout = job.model.linear_attention, job.layout
    least = 0
    if job.numerics.kind == "exact":
        heads = -(-job.model.num_attention_heads // layout.tp)
        least = min(WORKING_BYTES, 8 * heads * job.batch.row_tokens * min(job.data.context, job.batch.row_tokens))
    if linear is None or not any(job.model.is_linear(layer) for layer in range(part.start, part.stop)):
        return least
    # Context ranks exchange tokens for heads: a head has all tokens of the row.
    of_token = linear.values_per_key * delta_bytes(linear.linear_key_head_dim, linear.linear_value_head_dim)
    of_head = job.batch.row_tokens * of_token
    heads = -(-linear.linear_num_key_heads // (layout.tp * layout.cp))
    return max(least, min(heads * of_head, max(of_head, WORKING_BYTES)))


def _logits(job: Job, rows: int) -> int:
    """Of the rows whose probabilities wait for the backward pass, or for weight gradients."""
    model = job.model
    tokens, columns = -(-job.batch.row_tokens // job.layout.cp), -(-model.vocabulary // job.layout.tp)
    return rows * min(4 * tokens * columns, job.memory.saved_logits_mb << 20) * (1 + model.mtp_layers)


def _block_bytes(job: Job, layer: int) -> int:
    """Saved per token by a block: the residual stream at both norms (float32), of which a tensor rank has a part of the
    tokens; outputs of both norms (compute type), which it gathers; and its part of what attention or the gated delta
    rule, and the feed-forward part, keep."""
    model, tp = job.model, job.layout.tp
    low = 2 if job.numerics.dtype == "bfloat16" else 4
    divided = 4 * 2 * model.hidden_size + _mixer_bytes(model, layer, low)
    return 2 * low * model.hidden_size + divided // tp + _feed_bytes(model, layer, low, tp)


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


def _feed_bytes(model: Model, layer: int, low: int, tp: int) -> int:
    """Saved per token by a layer's feed-forward part; ``low``: bytes of the compute type."""
    if not model.is_sparse(layer) or model.experts is None:
        return low * 3 * model.intermediate_size // tp  # gate, up and their product
    experts = model.experts
    # Scores; for each choice what comes in and what goes out, and where it is (int64), which every tensor rank has
    # whole, and its part of gate, up and their product.
    copies = low * 2 * model.hidden_size + 3 * 8 + low * 3 * experts.moe_intermediate_size // tp
    shared = low * (3 * experts.shared_expert_intermediate_size + experts.shared_expert_gate * model.hidden_size)
    return (4 * experts.num_experts + shared) // tp + experts.num_experts_per_tok * copies
