"""A division as text for a terminal. Every line fits the width; what is too much to read is left out and counted."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from equigrad.schedule.division import DividedRow, Division, Share
from equigrad.schedule.pipeline import Action, PipelineKind, Simulation, Span

_MOST_LINES, _MOST_LANES, _MOST_CONTEXTS, _MOST_PIPES = 60, 8, 8, 16
_FILL = {"forward": "─", "backward": "═", "input_backward": "━", "weight_backward": "╌"}
LETTERS = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}
ASCII = str.maketrans("█▓·─═━╌…", "#%.-==~.")
"""For terminals that show nothing else."""


def some(count: int, most: int) -> Iterator[range]:
    """Which of ``count`` things are shown, one after another, as ranges of one; a longer range is left out."""
    if count <= most:
        shown = [range(i, i + 1) for i in range(count)]
    else:
        shown = [range(i, i + 1) for i in range(most - 2)] + [range(most - 2, count - 1), range(count - 1, count)]
    yield from shown


def rank_text(ranks: Sequence[int], most: int = 4) -> str:
    """Ascending ranks as ranges: 0-3, 8-11."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{a}-{b}" if b > a else f"{a}" for a, b in runs]
    if len(texts) > most:
        texts = [*texts[: most - 1], "…", texts[-1]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def piece_texts(division: Division, share: Share) -> list[str]:
    """The samples of a share, with the tokens of those that are not whole: #3, #4[0:16]."""
    samples = division.samples
    return [
        f"#{p.sample}" if p.stop - p.start == samples[p.sample].length else f"#{p.sample}[{p.start}:{p.stop}]"
        for p in share.pieces
    ]


def headline(division: Division) -> str:
    """What the step is made of."""
    several = len(set(division.kinds))
    kinds = f" of {several} modalities" if several > 1 else ""
    samples = f"{len(division.samples):,} samples{kinds}, {division.tokens:,} tokens"
    loss = "all" if division.loss_tokens == division.tokens else f"{division.loss_tokens:,}"
    return f"{division.name}, step {division.step}: {samples}, {loss} of them in the loss"


def totals(division: Division) -> list[tuple[str, str]]:
    """What the whole amounts to, as names and values."""
    layout, rows = division.layout, len(division.rounds) * division.layout.data_lanes
    found = [
        ("real tokens", f"{division.tokens:,}"),
        ("executed tokens", f"{division.executed_tokens:,}"),
        ("rows", f"{rows:,}" + (f", {division.empty_rows:,} empty" if division.empty_rows else "")),
    ]
    if layout.data_lanes > 1:
        found.append(("imbalance between lanes", f"{division.imbalance:.2f}"))
        found.append(("round by round", f"{division.round_imbalance:.2f}"))
    if division.timeline is not None:
        found.append(("bubble", f"{division.bubble:.1%}"))
    return found


def stage_text(division: Division, pipe: int) -> str:
    """The blocks of a pipeline rank."""
    texts = []
    for part in division.stages[pipe :: division.layout.pp]:
        blocks = f"{part.start}-{part.stop - 1}" if part.stop - part.start > 1 else f"{part.start}"
        texts.append(
            f"{'embedding, ' * part.first}block{'s' * (part.stop - part.start > 1)} {blocks}{', head' * part.last}"
        )
    return " | ".join(texts)


def expert_text(division: Division) -> str:
    """How the experts are divided, and that tokens go to them as the routers choose."""
    layout, experts = division.layout, division.experts
    if experts is None:
        return ""
    if layout.ep == 1:
        return f"all {experts} experts on every rank"
    first, last = division.experts_of(0), division.experts_of(layout.ep - 1)
    return (
        f"{experts} experts over {layout.ep} ranks of dp_shard x cp: {first[0]}-{first[1] - 1} on the first,"
        f" {last[0]}-{last[1] - 1} on the last; tokens go where the routers send them"
    )


def schedule_text(kind: PipelineKind, division: Division) -> str:
    """What kind of pipeline it is."""
    layout = division.layout
    stages = f"{layout.pp} ranks" + (f" x {layout.pp_stages} stages" if layout.pp_stages > 1 else "")
    return f"{kind}, {stages}, {len(division.rounds)} micro-batches (one a round)"


def draw_text(division: Division, width: int = 100) -> str:
    """The whole drawing, ending in a line end."""
    lines = [headline(division), f"layout   {division.layout.describe()}"]
    lines += [f"experts  {text}" for text in [expert_text(division)] if text]
    layout = division.layout
    tall = min(layout.data_lanes, _MOST_LANES) * (1 + min(layout.cp, _MOST_CONTEXTS)) + 2
    for rounds in some(len(division.rounds), max(3, min(8, _MOST_LINES // tall))):
        lines += ["", *(_round(division, rounds[0], width) if len(rounds) == 1 else _left_out(division, rounds))]
    if division.timeline is not None:
        lines += ["", *_pipeline(division, division.timeline, width)]
    lines += ["", *wrap("   ".join(f"{name} {value}".replace(" ", "\0") for name, value in totals(division)), width)]
    lines = [line.replace("\0", " ") for line in lines]
    return "\n".join(_cut(line, width) for line in lines) + "\n"


def modality_text(division: Division, number: int) -> str:
    """What kind of tokens a round has; empty where all are of one kind."""
    return f" · {division.kinds[number]}" if len(set(division.kinds)) > 1 else ""


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _left_out(division: Division, rounds: range) -> list[str]:
    rows = [row for number in rounds for row in division.rounds[number]]
    return [f"… rounds {rounds[0]}-{rounds[-1]}: {_summary(rows)}"]


def _summary(rows: Sequence[DividedRow]) -> str:
    sizes, empty = [row.tokens for row in rows], sum(not row.samples for row in rows)
    return f"{len(rows):,} rows of {min(sizes):,} to {max(sizes):,} tokens" + (f", {empty:,} empty" if empty else "")


def _round(division: Division, number: int, width: int) -> Iterator[str]:
    rows = division.rounds[number]
    yield f"round {number}{modality_text(division, number)}"
    for lanes in some(len(rows), _MOST_LANES):
        if len(lanes) == 1:
            yield from _row(division, rows[lanes[0]], lanes[0], width)
        else:
            yield f"  … lanes {lanes[0]}-{lanes[-1]}: {_summary([rows[lane] for lane in lanes])}"


def _row(division: Division, row: DividedRow, lane: int, width: int) -> Iterator[str]:
    ranks = rank_text(division.ranks(lane))
    if not row.samples:
        yield f"  lane {lane:<4} {'empty':>5}  {ranks}: no token, but part in every collective"
        return
    bar = max(20, width // 3)
    samples = " ".join(f"#{sample}:{length}" for sample, length in row.samples)
    if division.layout.cp == 1:
        yield f"  lane {lane:<4} {row.tokens:>5}  {_bar(division, row, row.shares, bar)}  {ranks}  {samples}"
        yield from _tensor(row.shares[0], 15)
        return
    yield f"  lane {lane:<4} {row.tokens:>5}  {'':<{bar}}  {ranks}  {samples}"
    for some_contexts in some(len(row.shares), _MOST_CONTEXTS):
        context = some_contexts[0]
        if len(some_contexts) > 1:
            yield f"    … context ranks {context}-{some_contexts[-1]}"
            continue
        share = row.shares[context]
        held = " ".join(piece_texts(division, share)) or "no token"
        owners = rank_text(division.ranks(lane, context))
        yield f"    cp {context:<4} {share.tokens:>5}  {_bar(division, row, [share], bar)}  {owners}  {held}"
        yield from _tensor(share, 17)


def _tensor(share: Share, indent: int) -> Iterator[str]:
    """Between the ops that divide features, tensor ranks divide tokens."""
    if len(share.tensor) > 1:
        yield f"{'':<{indent}}tensor ranks: {' + '.join(map(str, share.tensor))}"


def _bar(division: Division, row: DividedRow, shares: Sequence[Share], width: int) -> str:
    """Where in its row the tokens of some shares lie; neighbouring samples look different."""
    shade = {sample: "█▓"[place % 2] for place, (sample, _) in enumerate(row.samples)}
    pieces = [piece for share in shares for piece in share.pieces]
    cells = ""
    for cell in range(width):
        token = int((cell + 0.5) * division.longest / width)
        mine = [shade[p.sample] for p in pieces if p.at <= token < p.at + p.stop - p.start]
        cells += mine[0] if mine else "·" if token < row.tokens else " "
    return cells


def _pipeline(division: Division, timeline: Simulation, width: int) -> Iterator[str]:
    yield f"pipeline {schedule_text(division.layout.pp_schedule, division)}, bubble {division.bubble:.1%}"
    for pipes in some(len(timeline.spans), _MOST_PIPES):
        if len(pipes) > 1:
            yield f"  … pipeline ranks {pipes[0]}-{pipes[-1]}"
            continue
        yield f"  pp {pipes[0]:<3} {_timeline(timeline.spans[pipes[0]], timeline.time, width - 9)}"
    split = division.layout.pp_schedule == "zero_bubble"
    yield f"  F forward, B backward{', as I of the input and W of weights' * split}, · waiting; the number is the round"
    for pipes in some(len(timeline.spans), _MOST_PIPES):
        if len(pipes) == 1:
            yield f"  pp {pipes[0]:<3} {stage_text(division, pipes[0])}"


def _timeline(spans: Sequence[Span], time: float, width: int) -> str:
    cells = ["·"] * width
    for span in spans:
        action = span.action
        if not isinstance(action, Action):
            continue
        first, last = round(span.start / time * width), round(span.end / time * width)
        label = f"{LETTERS[action.kind]}{action.microbatch}"
        text = label if len(label) < last - first else ""
        cells[first:last] = text.ljust(last - first, _FILL[action.kind])
    return "".join(cells)
