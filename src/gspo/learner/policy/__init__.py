HEAD_CHUNK = 256  # hidden rows per chunk of the language-model head: it limits the memory of logits, not results
