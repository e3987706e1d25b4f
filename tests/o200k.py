"""How o200k_base, gpt-oss's vocabulary, splits a text."""

LETTERS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
O200K_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?" + "{}*{}+{}".format(*LETTERS),
        r"[^\r\n\p{L}\p{N}]?" + "{}+{}*{}".format(*LETTERS),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Between what o200k_base merges no pieces: as tiktoken publishes it."""
