# A group on padded rows is forked (forking.py) if this saves at least that many tokens, and a quarter of its tokens.
# Fewer tokens would not pay for the two calls, because plain rows of many groups share one.
FORK_TOKENS = 1024
HEAD_CHUNK = 256  # hidden rows per chunk of the language-model head: it limits the memory of logits, not results
