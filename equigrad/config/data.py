"""Which text is trained on, how it becomes tokens, and how tokens become a step's batch."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from equigrad.config.base import Section

DEFAULT_TOKENS = 16384
"""Token budget of a step where the job sets neither ``batch.tokens`` nor ``batch.samples``."""


class Source(Section):
    """One source of documents. A bare string in ``data.sources`` is short for ``{path = "..."}``."""

    path: str = Field(min_length=1)
    """``builtin:moby-dick``, ``builtin:sotu``, a ``.txt``/``.jsonl``/``.jsonl.gz``/``.parquet`` file, a glob of such
    files, or ``hf:NAME`` for a Hugging Face dataset (needs the ``data`` extra)."""
    weight: float = Field(1.0, gt=0)
    """Share of the tokens drawn from this source, relative to the other sources."""
    format: Literal["auto", "text", "messages", "prompt"] = "auto"
    """``text``: every token is learned. ``messages``: a chat, loss on assistant tokens only. ``prompt``: ``prompt``
    and ``completion``, loss on the completion only. ``auto`` decides by the keys of the first record."""
    modality: str = Field("text", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """What kind of tokens the source has, by any name. Those of one name are computed together: no row has two kinds,
    and lanes compute the same kind at the same time."""
    text_key: str = "text"
    """Key (or column) that holds the text, for ``format = "text"``."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class TokenizerConfig(Section):
    """How text becomes tokens."""

    kind: Literal["bytes", "bpe", "file"] = "bpe"
    """``bytes``: one token a byte. ``bpe``: byte-level BPE, trained on the training documents when the run starts.
    ``file``: a ``tokenizer.json`` or a folder that holds one."""
    vocab_size: int = Field(2048, ge=259)
    """Vocabulary of a BPE trained here, special tokens included."""
    path: str | None = None
    """The ``tokenizer.json`` (or its folder) for ``kind = "file"``."""
    bos_token: str | None = None
    """Begin-of-text token; by default the tokenizer's own, else its end-of-text token."""
    eos_token: str | None = None
    """End-of-text token; by default the tokenizer's own."""
    chat_template: str | None = None
    """File with a Jinja chat template; by default the tokenizer's own, else ChatML."""

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> "TokenizerConfig":
        if (self.kind == "file") != (self.path is not None):
            raise ValueError('path goes with kind = "file", and only with it')
        return self


class Data(Section):
    """Which documents are trained on and held out."""

    sources: list[Source] = Field([Source(path="builtin:moby-dick")], min_length=1)
    """Where the training documents come from; several sources mix by weight. A single one needs no brackets."""
    held_out_every: int = Field(0, ge=0)
    """Hold out every n-th document of each source (the n-th, 2n-th, ...) for evaluation; 0 holds out none."""
    held_out_sources: list[Source] = []
    """Sources of which every document is held out."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    context: int = Field(512, ge=1)
    """Most tokens of one sample. A longer document becomes several samples; positions restart in each."""
    too_long: Literal["split", "drop"] = "split"
    """What happens to a fine-tuning record longer than the context; drops are counted and reported."""
    append_eos: bool = True
    """Whether the model learns to predict the end-of-text token after each document."""
    shuffle: bool = True
    """Draw the samples of each epoch in an order given by the seed, else in file order."""
    cache: str | None = None
    """Folder of tokenised sources; by default ``$EQUIGRAD_CACHE``, else ``~/.cache/equigrad``."""

    @field_validator("held_out_every")
    @classmethod
    def _some_are_trained_on(cls, value: int) -> int:
        if value == 1:
            raise ValueError("1 holds out every document and leaves none to train on; 2 holds out every other one")
        return value

    @field_validator("sources", "held_out_sources", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value


class BatchConfig(Section):
    """Which samples make one step, and how they are packed into rows. Independent of the number of ranks."""

    tokens: int | None = Field(None, ge=1)
    """Most tokens of one step, over all ranks: samples are taken in order while they fit (at least one). By default
    16384, where ``samples`` is not given either."""
    samples: int | None = Field(None, ge=1)
    """Number of samples of one step, over all ranks, instead of ``tokens``."""
    row_tokens: int = Field(4096, ge=1)
    """Most tokens of one row: what one data lane computes in one forward and backward. At least ``data.context``."""
    packing: Literal["best_fit", "first_fit"] = "best_fit"
    """How samples, longest first, choose their row: the fullest one that has room, or the first."""

    @property
    def budget(self) -> int:
        """The token budget, the default applied; it does not hold where ``samples`` is set."""
        return self.tokens or DEFAULT_TOKENS

    @model_validator(mode="after")
    def _one_budget(self) -> "BatchConfig":
        if self.tokens is not None and self.samples is not None:
            raise ValueError("give batch.tokens or batch.samples, not both; `none` takes one of them away")
        return self
