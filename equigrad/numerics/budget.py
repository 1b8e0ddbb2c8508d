"""How much working memory ops allow themselves beside what they keep. Torch-free, so that estimates know it too."""

WORKING_BYTES = 256 << 20
"""What is computed in pieces takes about as much at a time, if a piece can be so small."""

WAVE_ENTRIES = 1 << 24
"""Of the matrices that a rank makes orthogonal, about so many entries are whole at a time: those of a wave."""

PIECE_ENTRIES = 1 << 20
"""Of a tensor, entries that an optimizer works on at a time where float64 is on the way: some seventy bytes each."""


def delta_bytes(key_dim: int, value_dim: int) -> int:
    """Working memory of the gated delta rule's backward pass for each token and value head, as measured: about twenty
    vectors of the widths of a key and a value, and six rows of a chunk of 64, in float32."""
    return 4 * (20 * (key_dim + value_dim) + 6 * 64)
