"""A division as one SVG file: no script, no font or image from elsewhere, colours for light and for dark screens.

Each round is a column, each data lane a band, each of its context ranks a track. A track is the row from its first
token to its last, and what lies on it is what that rank holds; a colour is a sample. Beneath, the pipeline's time.
"""

from collections.abc import Iterator, Sequence
from html import escape

from equigrad.schedule.division import DividedRow, Division, Piece, Share
from equigrad.schedule.pipeline import Action, Simulation
from equigrad.schedule.text import (
    LETTERS,
    expert_text,
    headline,
    modality_text,
    piece_texts,
    rank_text,
    schedule_text,
    some,
    stage_text,
    totals,
)

_WIDTH, _MARGIN, _LABELS, _GAP = 1200, 28, 186, 16
_MOST_ROUNDS, _MOST_TRACKS, _MOST_CONTEXTS, _MOST_PIPES = 5, 20, 8, 16
_HUES = 8

_STYLE = """
svg { color-scheme: light dark; --page: #ffffff; --text: #1b1f26; --quiet: #5d6675; --edge: #d5dae2; --track: #f1f3f6;
  --hatch: #c3cad4; --h0: #bcd7fb; --h1: #fbd3a8; --h2: #c2e8c4; --h3: #f5c3cf; --h4: #d9cdf7; --h5: #f3e3a0;
  --h6: #b9e6e4; --h7: #dfd5c8; --f: #bcd7fb; --b: #fbd3a8; --i: #f5c3cf; --w: #c2e8c4; }
@media (prefers-color-scheme: dark) { svg { --page: #0f1217; --text: #e6e9ee; --quiet: #98a2b3; --edge: #323945;
  --track: #1a1f27; --hatch: #465061; --h0: #1f4b85; --h1: #7c4a14; --h2: #23603a; --h3: #7d2f44; --h4: #4f3f8c;
  --h5: #645410; --h6: #15605d; --h7: #5a4f42; --f: #1f4b85; --b: #7c4a14; --i: #7d2f44; --w: #23603a; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text);
  font-variant-numeric: tabular-nums; }
.title { font-size: 18px; font-weight: 600; } .quiet { fill: var(--quiet); } .small { font-size: 11px; }
.name { font-weight: 600; } .value { font-size: 17px; font-weight: 600; } .mid { text-anchor: middle; }
.page { fill: var(--page); stroke: var(--edge); } .track { fill: var(--track); } .line { stroke: var(--edge); }
.empty { fill: url(#hatch); stroke: var(--edge); } .stripe { stroke: var(--hatch); stroke-width: 1.2; }
.piece { stroke: var(--page); stroke-width: 1; } .cut { stroke: var(--text); stroke-width: 1.5; opacity: .7; }
"""


def draw_svg(division: Division) -> str:
    """The whole file."""
    drawing = _Drawing(division)
    drawing.head()
    drawing.rounds()
    if division.timeline is not None:
        drawing.pipeline(division.timeline)
    return drawing.file()


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}"{_class(kind)}>{escape(text)}</text>'


def _box(
    x: float, y: float, width: float, height: float, kind: str, radius: int = 3, told: str = "", fill: str = ""
) -> str:
    style = f' style="fill:var(--{fill})"' if fill else ""
    shape = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{radius}"{_class(kind)}{style}'
    return f"<rect {shape}><title>{escape(told)}</title></rect>" if told else f"<rect {shape}/>"


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(to_x)}" y2="{_n(to_y)}"{_class(kind)}/>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _fitting(texts: Sequence[str], width: float, size: float = 11) -> str:
    """The first of some texts, the longest one first, that fits; none where none does."""
    return next((text for text in texts if len(text) * size * 0.6 <= width - 4), "")


class _Drawing:
    """Parts of the file, from top to bottom; ``y`` is where the next one begins."""

    def __init__(self, division: Division) -> None:
        self.division, self.y, self.parts = division, 0.0, list[str]()
        self.columns = list(some(len(division.rounds), _MOST_ROUNDS))
        gaps = sum(len(column) > 1 for column in self.columns)
        room = _WIDTH - 2 * _MARGIN - _LABELS - _GAP * (len(self.columns) - 1)
        self.left_out = 84.0
        self.column = (room - gaps * self.left_out) / (len(self.columns) - gaps)
        contexts = min(division.layout.cp, _MOST_CONTEXTS)
        self.contexts = list(some(division.layout.cp, _MOST_CONTEXTS))
        self.lanes = list(some(division.layout.data_lanes, max(4, min(16, _MOST_TRACKS // contexts))))
        self.track = 32 if contexts == 1 else 22

    def file(self) -> str:
        """Everything, with its frame."""
        height = self.y + _MARGIN - 8
        title = f"equigrad schedule: {headline(self.division)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_n(height)}" width="{_WIDTH}"'
                f' height="{_n(height)}" role="img">',
                f"<title>{escape(title)}</title>",
                f"<style>{_STYLE}</style>",
                '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse"'
                ' patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="7" class="stripe"/></pattern></defs>',
                _box(0.5, 0.5, _WIDTH - 1, height - 1, "page", 10),
                *self.parts,
                "</svg>\n",
            ]
        )

    def head(self) -> None:
        """What is drawn, and what it amounts to."""
        division = self.division
        self.parts += [
            _text(_MARGIN, 42, headline(division), "title"),
            _text(_MARGIN, 63, division.layout.describe(), "quiet"),
        ]
        x = float(_MARGIN)
        for name, value in totals(division):
            self.parts += [_text(x, 93, name, "quiet small"), _text(x, 114, value, "value")]
            x += max(len(name) * 6.2, len(value) * 9.4) + 34
        self.y = 134.0
        if text := expert_text(division):
            self.parts.append(_text(_MARGIN, self.y + 6, text, "quiet"))
            self.y += 20

    def rounds(self) -> None:
        """Lanes from top to bottom, rounds from left to right."""
        division, x = self.division, float(_MARGIN + _LABELS)
        self.parts.append(_line(_MARGIN, self.y, _WIDTH - _MARGIN, self.y, "line"))
        self.y += 24
        starts = []
        for column in self.columns:
            starts.append(x)
            if len(column) == 1:
                name = f"round {column[0]}{modality_text(division, column[0])}"
                name = _fitting([name], self.column, 13) or f"round {column[0]}"
            else:
                name = f"{column[0]}-{column[-1]}"
            self.parts.append(_text(x, self.y, name, "name" if len(column) == 1 else "quiet"))
            x += (self.column if len(column) == 1 else self.left_out) + _GAP
        self.y += 10
        for lanes in self.lanes:
            if len(lanes) == 1:
                self._lane(lanes[0], starts)
            else:
                ranks = [rank for lane in lanes for rank in division.ranks(lane)]
                rows = [rows[lane] for rows in division.rounds for lane in lanes]
                self.y += 18
                text = f"… lanes {lanes[0]}-{lanes[-1]}, {rank_text(sorted(ranks))}: {_sizes(rows)}"
                self.parts.append(_text(_MARGIN, self.y, text, "quiet"))
                self.y += 14
        self.y += 8
        told = ["a colour is a sample"]
        if division.layout.cp > 1:
            told.append("#2[0:9]: its tokens from 0 up to 9")
        if division.layout.tp > 1:
            told.append("notch: border between tensor ranks, where ops do not divide features")
        told.append("hatched: no token, but part in every collective")
        self.parts.append(_text(_MARGIN, self.y + 8, " · ".join(told), "quiet small"))
        self.y += 22

    def _lane(self, lane: int, starts: Sequence[float]) -> None:
        division = self.division
        several = division.layout.cp > 1
        top = self.y + 6
        self.parts.append(_text(_MARGIN, top + (15 if several else 14), f"lane {lane}", "name"))
        if not several:
            self.parts.append(_text(_MARGIN, top + 28, _shortest(division.ranks(lane), 28), "quiet small"))
        y = top
        for contexts in self.contexts:
            context = contexts[0]
            if len(contexts) > 1:
                text = f"… context ranks {context}-{contexts[-1]}"
                self.parts.append(_text(_MARGIN + 46, y + 12, text, "quiet small"))
                y += 18
                continue
            if several:
                name = f"cp {context} · {_shortest(division.ranks(lane, context), 17)}"
                self.parts.append(_text(_MARGIN + 46, y + 15, name, "quiet small"))
            for column, x in zip(self.columns, starts, strict=True):
                row = division.rounds[column[0]][lane]
                if len(column) == 1:
                    self.parts += self._track(row, row.shares[context], x, y)
                elif context == 0:
                    rows = [division.rounds[number][lane] for number in column]
                    self.parts.append(
                        _text(x, y + self.track / 2 + 4, f"{sum(r.tokens for r in rows):,} tokens", "quiet small")
                    )
            y += self.track + (3 if several else 0)
        self.y = y + (6 if several else 4)

    def _track(self, row: DividedRow, share: Share, x: float, y: float) -> Iterator[str]:
        """One context rank in one round."""
        scale = self.column / max(self.division.longest, 1)
        if not row.samples:
            yield _box(x, y, self.column, self.track, "empty", told="an empty row")
            yield _text(x + 8, y + self.track / 2 + 4, "empty", "quiet small")
            return
        yield _box(x, y, row.tokens * scale, self.track, "track" if share.pieces else "empty")
        place = {sample: number for number, (sample, _) in enumerate(row.samples)}
        for piece, text in zip(share.pieces, piece_texts(self.division, share), strict=True):
            size = piece.stop - piece.start
            length = self.division.samples[piece.sample].length
            told = f"sample {piece.sample}, {length:,} tokens: here {piece.start} up to {piece.stop}, {size:,} of them"
            at, width, hue = x + piece.at * scale, size * scale, (row.samples[0][0] + place[piece.sample]) % _HUES
            yield _box(at, y, width, self.track, "piece", told=told, fill=f"h{hue}")
            whole = [f"{text} · {size}"] if "[" not in text else []
            if label := _fitting([*whole, text, f"#{piece.sample}"], width):
                yield _text(at + width / 2, y + self.track / 2 + 4, label, "small mid")
        for at in _cuts(share):
            for top in (y + 1, y + self.track - 6):  # above and below the text
                yield _line(x + at * scale, top, x + at * scale, top + 5, "cut")

    def pipeline(self, timeline: Simulation) -> None:
        """Each pipeline rank's time, from left to right."""
        division, x = self.division, float(_MARGIN + _LABELS)
        self.y += 4
        self.parts.append(_line(_MARGIN, self.y, _WIDTH - _MARGIN, self.y, "line"))
        self.y += 26
        kind = f"pipeline: {schedule_text(division.layout.pp_schedule, division)}"
        self.parts.append(_text(_MARGIN, self.y, kind, "name"))
        self.y += 12
        scale = (_WIDTH - _MARGIN - x) / timeline.time
        for pipes in some(len(timeline.spans), _MOST_PIPES):
            if len(pipes) > 1:
                self.parts.append(_text(_MARGIN, self.y + 14, f"… pipeline ranks {pipes[0]}-{pipes[-1]}", "quiet"))
                self.y += 22
                continue
            pipe = pipes[0]
            self.parts += [
                _text(_MARGIN, self.y + 13, f"pipeline rank {pipe}", "name"),
                _text(_MARGIN, self.y + 27, stage_text(division, pipe), "quiet small"),
                _box(x, self.y, timeline.time * scale, 32, "empty", told="waiting"),
            ]
            for span in timeline.spans[pipe]:
                if isinstance(span.action, Action):
                    at, width = x + span.start * scale, (span.end - span.start) * scale
                    letter = LETTERS[span.action.kind]
                    self.parts.append(_box(at, self.y, width, 32, "piece", told=str(span.action), fill=letter.lower()))
                    name = f"{letter}{span.action.microbatch}"
                    if division.layout.pp_stages > 1:
                        stage = span.action.stage // division.layout.pp
                        name = f"{name}·{stage}"
                    if label := _fitting([name, name[1:]], width + 4):
                        self.parts.append(_text(at + width / 2, self.y + 20, label, "small mid"))
            self.y += 38
        self._key(timeline)

    def _key(self, timeline: Simulation) -> None:
        kinds = {span.action.kind for spans in timeline.spans for span in spans}
        names = {"forward": "forward", "backward": "backward", "input_backward": "gradient of the input",
                 "weight_backward": "gradient of the weights"}  # fmt: skip
        x = float(_MARGIN + _LABELS)
        for kind, name in names.items():
            if kind in kinds:
                letter = LETTERS[kind]
                self.parts += [
                    _box(x, self.y + 2, 14, 14, "piece", told="", fill=letter.lower()),
                    _text(x + 20, self.y + 13, f"{letter} {name}", "quiet small"),
                ]
                x += 46 + len(name) * 6
        note = "hatched: waiting · the number is the round"
        if self.division.layout.pp_stages > 1:
            note += ", then the rank's stage"
        self.parts.append(_text(x, self.y + 13, note, "quiet small"))
        self.y += 26


def _sizes(rows: Sequence[DividedRow]) -> str:
    sizes, empty = [row.tokens for row in rows], sum(not row.samples for row in rows)
    return f"rows of {min(sizes):,} to {max(sizes):,} tokens" + (f", {empty:,} empty" if empty else "")


def _shortest(ranks: Sequence[int], width: int) -> str:
    """Ranks in at most so many characters."""
    return next((t for most in (4, 3, 2) if len(t := rank_text(ranks, most)) <= width), rank_text(ranks, 1))


def _cuts(share: Share) -> Iterator[float]:
    """Where in the row one tensor rank's tokens end and the next one's begin."""
    edges, held = [], 0
    for tokens in share.tensor[:-1]:
        held += tokens
        edges.append(held)
    passed = 0
    for piece in share.pieces:
        size = piece.stop - piece.start
        yield from (_at(piece, edge - passed) for edge in edges if passed < edge < passed + size)
        passed += size


def _at(piece: Piece, tokens: int) -> float:
    return piece.at + tokens
