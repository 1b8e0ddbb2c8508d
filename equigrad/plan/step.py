"""How long one step takes, by part, and what limits it. Ungated: ask ``plan.gates`` for answers that may be shown.

What is exposed: exchanges of tensor and expert ranks and of Ulysses' context ranks, for each has a result that the next
op needs. A ring's keys and values travel beside attention. Sharded weights, gradients and messages of a pipeline are
hidden, where they are made to overlap, by as much computation as there is in the same pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equigrad.plan.calibration import Calibration, calibration
from equigrad.plan.collectives import Groups, Network
from equigrad.plan.compute import Speed, by_part
from equigrad.plan.hardware import GB, TERA, Hardware, hardware
from equigrad.plan.ops import again, head_ops, layer_ops
from equigrad.plan.shape import Layer
from equigrad.plan.workload import LOW, Workload

Parts = dict[str, float]

COMPUTE = ("products", "attention", "elementwise")
LIMITS = {
    "products": "matrix products", "attention": "attention", "elementwise": "memory bandwidth",
    "recompute": "recomputation", "tensor": "exchanges of tensor ranks", "context": "exchanges of context ranks",
    "expert": "exchanges of expert ranks", "pipeline": "messages of the pipeline", "bubble": "the pipeline's bubble",
    "sharding": "gathering and reducing sharded weights", "replicas": "reducing gradients of replicas",
    "optimizer": "the optimizer", "offload": "the link to the host",
}  # fmt: skip
"""The parts of a step, and each in words."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part (keys of ``LIMITS``); tokens of the step, GPUs, and operations per token."""

    parts: Mapping[str, float]
    tokens: int
    gpus: int
    model_flops: float
    peak: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: of all keys of a sample, no recomputation, bfloat16's peak."""
        return self.tokens_per_second * self.model_flops / self.peak

    @property
    def limit(self) -> str:
        """What takes most beside the matrix products, or these, where nothing takes a quarter as long."""
        part = max((name for name in self.parts if name != "products"), key=lambda name: self.parts[name])
        return LIMITS[part if 4 * self.parts[part] > self.parts["products"] else "products"]


def step(work: Workload, machine: str, fitted: Calibration | None = None, known: Hardware | None = None) -> Step:
    """The time of a step on a kind of machine. ``UserError`` for machines and devices that are not there."""
    known, fitted = known or hardware(), fitted or calibration()
    return Clock(work, machine, fitted, known).step()


def stage_seconds(
    work: Workload, machine: str, fitted: Calibration | None = None, known: Hardware | None = None
) -> list[tuple[float, float]]:
    """Of each pipeline stage, forward and backward for one micro-batch: its layers, the head, and what ranks exchange
    inside layers. Messages of the pipeline and sharded weights are not in it."""
    clock = Clock(work, machine, fitted or calibration(), known or hardware())
    both = [clock.stage(stage) for stage in range(work.stages)]
    return [(sum(forward.values()), sum(backward.values())) for forward, backward in both]


class Clock:
    """One workload on one machine, taken apart."""

    def __init__(self, work: Workload, name: str, fitted: Calibration, known: Hardware) -> None:
        self.work, self.layout, self.fitted = work, work.layout, fitted
        machine = known.machine(name)
        self.device = known.device(machine.device)
        self.speed = Speed.of(known, machine.device, fitted, work)
        self.linear = Speed.of(known, machine.device, fitted, work, work.fp8)
        self.network = Network(machine, fitted.link.value)
        self.groups = Groups.of(work.layout, machine)
        stream = LOW * work.row_tokens * work.shape.hidden
        self.message = self.network.send(stream / work.layout.tp, self.groups.pipeline)
        self._layers: dict[Layer, tuple[Parts, Parts]] = {}

    def step(self) -> Step:
        work, layout = self.work, self.layout
        ranks = [self.rank(rank) for rank in range(layout.pp)]
        seconds = [sum(sum(parts.values()) for parts in rank) for rank in ranks]
        slowest = seconds.index(max(seconds))
        parts = dict.fromkeys(LIMITS, 0.0)
        for one in ranks[slowest]:
            for name, value in one.items():
                parts[name] += value * work.micro_batches
        parts["bubble"] = self._bubble(ranks, seconds, slowest)
        if work.overlap:  # the first and the last micro-batch have nothing to travel beside
            parts["pipeline"] += 2 * (layout.pp - 1) * self.message
        # Ranks wait at the beginning and at the end, and can gather and reduce meanwhile. Of several stages all but one
        # have the passes of the others to hide behind, which a first group of micro-batches goes through.
        passes = 1 + (min(layout.pp, work.micro_batches) - 1) * (1 - 1 / layout.pp_stages)
        first, last = (passes * sum(one.values()) + parts["bubble"] / 2 for one in ranks[slowest])
        for name, value in self.once(*self._weights(slowest), first, last):
            parts[name] += value
        flops = work.shape.model_flops(work.sequence)
        return Step(parts, work.tokens, layout.world_size, flops, self.device.peak.value * TERA)

    def rank(self, rank: int) -> tuple[Parts, Parts]:
        """Seconds of one micro-batch through all stages of a pipeline rank, forward and backward."""
        forward, backward = Parts(), Parts()
        for stage in range(rank, self.work.stages, self.layout.pp):
            for total, one in zip((forward, backward), self.stage(stage), strict=True):
                _add(total, one)
            # A stage waits for what it receives from another rank, forward and backward, unless that travels meanwhile.
            if not self.work.overlap:
                _add(forward, {"pipeline": self.message * (stage > 0)})
                _add(backward, {"pipeline": self.message * (stage < self.work.stages - 1)})
        for total, reduces in ((forward, False), (backward, self.layout.reduce_every_round)):
            _add(total, self._sharding(rank, sum(total.values()), reduces))
        return forward, backward

    def stage(self, number: int) -> tuple[Parts, Parts]:
        """Seconds of one micro-batch in a stage's layers, and in the head behind the last, forward and backward."""
        forward, backward = Parts(), Parts()
        layers = self.work.stage(number)
        for layer in dict.fromkeys(layers):
            for total, one in zip((forward, backward), self.layer(layer), strict=True):
                _add(total, one, layers.count(layer))
        if number == self.work.stages - 1:
            for total, one in zip((forward, backward), self.head(), strict=True):
                _add(total, one)
        return forward, backward

    def layer(self, layer: Layer) -> tuple[Parts, Parts]:
        """Seconds of one micro-batch in one layer, forward and backward."""
        if layer in self._layers:
            return self._layers[layer]
        work, ops = self.work, layer_ops(self.work, layer)
        computed = by_part(ops, self.linear)
        forward, backward = ({name: pair[way] for name, pair in computed.items()} for way in (0, 1))
        shown = self._exchanges(layer, forward)
        _add(forward, shown)
        # Gradients of keys and values go round with them.
        _add(backward, self._exchanges(layer, backward, travelling=2))
        if work.recompute != "none":
            repeated = {"recompute": sum(again(work, op) * self.linear.seconds(op)[0] for op in ops)}
            if work.recompute == "block":
                repeated |= shown
            _add(backward, repeated, 1 / work.recompute_every)
        self._layers[layer] = forward, backward
        return forward, backward

    def head(self) -> tuple[Parts, Parts]:
        """Seconds of one micro-batch in the last norm, the head and the loss, forward and backward."""
        computed = by_part(head_ops(self.work), self.speed)
        return {n: pair[0] for n, pair in computed.items()}, {n: pair[1] for n, pair in computed.items()}

    def _exchanges(self, layer: Layer, computed: Parts, travelling: int = 1) -> Parts:
        """What shows of what ranks exchange inside a layer in one direction, beside what it computes."""
        work, layout, shape, network = self.work, self.layout, self.work.shape, self.network
        stream = LOW * work.row_tokens * shape.hidden
        parts = {}
        if layout.tp > 1:
            # Gathered before and reduced behind attention and feed-forward part: as much as two all-reduces.
            seconds = 4 * network.phase(stream, self.groups.tensor)
            if work.overlap_tensor:  # of as many pieces as ranks, one has nothing to travel beside
                seconds = seconds / layout.tp + max(0.0, seconds * (1 - 1 / layout.tp) - computed["products"])
            parts["tensor"] = seconds
        if layout.cp > 1:
            keys = LOW * work.row_tokens * 2 * shape.kv_heads * shape.head_size / layout.tp
            if layout.cp_strategy == "ring":  # each send beside the attention to what is there already
                sends = (layout.cp - 1) * network.send(travelling * keys, self.groups.context)
                beside = computed.get("attention", 0.0) * (1 - 1 / layout.cp)
                parts["context"] = max(0.0, sends - beside)
            else:
                size = LOW * work.row_tokens * (shape.queries + shape.projected) / layout.tp
                parts["context"] = network.all_to_all(size, self.groups.context)
        if layer.sparse and shape.experts is not None and layout.ep > 1:
            # Tensor ranks each send all copies: tokens are gathered before they are sent.
            parts["expert"] = 2 * network.all_to_all(stream * shape.experts.num_experts_per_tok, self.groups.expert)
        return parts

    def _weights(self, rank: int) -> tuple[float, float, int]:
        """Of a pipeline rank, gathered: weights that all expert ranks have, and its experts'; and its layers."""
        stages = range(rank, self.work.stages, self.layout.pp)
        weights = [self.work.stage_parameters(stage) for stage in stages]
        layers = sum(len(self.work.stage(stage)) for stage in stages)
        return float(sum(dense for dense, _ in weights)), float(sum(routed for _, routed in weights)), layers

    def _phases(self, dense: float, routed: float, layers: int, width: float) -> float:
        """Gathering, or reducing, all sharded weights of a rank, layer by layer; ``width``: bytes of one."""
        calls = max(1, layers)
        seconds = calls * self.network.phase(width * dense / calls, self.groups.shard)
        if routed and self.work.shards > self.layout.ep:
            among = self.groups.shard._replace(ranks=self.work.shards // self.layout.ep)
            among = among._replace(per_node=min(among.per_node, among.ranks))
            seconds += calls * self.network.phase(width * routed / calls, among)
        return seconds

    def _sharding(self, rank: int, computing: float, reduces: bool) -> Parts:
        """What shows of the communication of sharded weights in one pass over a micro-batch, beside so many seconds of
        computation. What happens once a step is not in it."""
        layout, state = self.layout, self.work.state
        if self.work.shards == 1 or layout.pp > 1:
            return {}
        weights = self._weights(rank)
        seconds = self._phases(*weights, state.gathered) if layout.reshard_after_forward else 0.0
        if reduces:
            seconds += self._phases(*weights, state.wire)
        return {"sharding": self._shown(seconds, computing)}

    def _shown(self, seconds: float, computing: float) -> float:
        return max(0.0, seconds - computing) if self.work.overlap else seconds

    def once(self, dense: float, routed: float, layers: int, first: float, last: float) -> Iterator[tuple[str, float]]:
        """What a rank with so many weights, as ``_weights`` has them, does once a step: weights are gathered, gradients
        reduced, weights updated. ``first``, ``last``: seconds of the first forward and of the last backward pass, which
        may hide it."""
        layout, state, work = self.layout, self.work.state, self.work
        kept = dense / work.shards + routed / max(1, work.shards // layout.ep)
        if work.shards > 1:
            gather, reduce = (self._phases(dense, routed, layers, width) for width in (state.gathered, state.wire))
            late = 0.0 if layout.reduce_every_round and layout.pp == 1 else reduce
            early = gather if layout.pp > 1 or not layout.reshard_after_forward else 0.0
            yield "sharding", self._shown(early, first) + self._shown(late, last)
        if layout.dp_replicate > 1:
            yield "replicas", self._shown(self.network.all_reduce(state.wire * kept, self.groups.replicate),
                                          last)  # fmt: skip
        moved = kept * (2 * (state.kept + state.moments) + state.gradient)
        if work.offload:
            # Gradients go to the host and weights come back; the update moves as much there as it would here, and the
            # host's memory is taken to be as fast as the link.
            host = self.device.host_link.value * GB
            yield "offload", (kept * (state.gradient + state.kept) + moved) / host
        else:
            yield "optimizer", moved / self.speed.memory

    def _bubble(self, ranks: list[tuple[Parts, Parts]], seconds: list[float], slowest: int) -> float:
        """What the slowest pipeline rank waits for: the first micro-batch on its way to it and back from it, through
        one stage of each other rank. Zero-bubble pipelines do weight gradients, half of the backward pass, meanwhile.
        """
        others = [number for number in range(len(ranks)) if number != slowest]
        waits = sum(seconds[number] for number in others) / self.layout.pp_stages
        if self.layout.pp_schedule == "zero_bubble":
            waits -= sum(sum(ranks[n][1].values()) for n in others) / self.layout.pp_stages
        return waits


def _add(total: Parts, parts: Mapping[str, float], times: float = 1) -> None:
    for name, value in parts.items():
        total[name] = total.get(name, 0.0) + times * value
