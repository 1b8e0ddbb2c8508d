"""Sources and tokenizers -> samples, in an order that a cursor resumes exactly. Numpy only: no torch, no ranks."""
