"""Whether a layout suits a model: every combination of degrees that cannot be, each with what would fit.

The one place for such rules. A job with a shape of its own is checked as it is read; one that takes its shape from
``model.weights``, once that is known.
"""

from collections.abc import Iterator

from equigrad.config.layout import Layout
from equigrad.config.model import Model


def misfits(layout: Layout, model: Model) -> Iterator[str]:
    """One message for each thing that is impossible. Context ranks suit any model: ``cp`` divides tokens."""
    heads, blocks, stages = model.kv_heads, model.num_hidden_layers, layout.pp * layout.pp_stages
    if layout.tp > heads:
        yield (
            f"layout.tp {layout.tp} divides key and value heads, and the model has"
            f" model.num_key_value_heads {heads}; layout.tp can be at most {heads}"
        )
    if layout.pp == 1 and layout.pp_stages > 1:
        yield f"layout.pp_stages {layout.pp_stages} needs a pipeline, and layout.pp is 1; leave layout.pp_stages at 1"
    elif stages > blocks:
        yield (
            f"layout.pp {layout.pp} x layout.pp_stages {layout.pp_stages} = {stages} stages need a block each, and the"
            f" model has model.num_hidden_layers {blocks}; {_fewer_stages(layout, blocks)}"
        )
    if layout.ep > 1:
        yield from _expert_misfits(layout, model)


def _fewer_stages(layout: Layout, blocks: int) -> str:
    ways = []
    if layout.pp <= blocks:
        ways.append(f"with layout.pp {layout.pp} layout.pp_stages can be at most {blocks // layout.pp}")
    if layout.pp_stages <= blocks:
        ways.append(f"with layout.pp_stages {layout.pp_stages} layout.pp can be at most {blocks // layout.pp_stages}")
    return ", ".join(ways) or f"layout.pp can be at most {blocks}, with layout.pp_stages 1"


def _expert_misfits(layout: Layout, model: Model) -> Iterator[str]:
    if model.experts is None:
        yield f"layout.ep {layout.ep} divides experts, and the model has none; leave layout.ep at 1"
        return
    lent, experts = layout.dp_shard * layout.cp, model.experts.num_experts
    fitting = [ep for ep in range(1, lent + 1) if lent % ep == 0 and ep <= experts]
    could = f"layout.ep can be {', '.join(map(str, fitting))}"
    if lent % layout.ep:
        yield (
            f"layout.ep {layout.ep} borrows the ranks of dp_shard x cp and must divide their number,"
            f" dp_shard {layout.dp_shard} x cp {layout.cp} = {lent}; {could}"
        )
    elif layout.ep > experts:
        yield f"layout.ep {layout.ep} is more than model.experts.num_experts {experts}; {could}"
