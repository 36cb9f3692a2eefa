"""Speech tokenizers: audio -> semantic tokens, and the training of the built-in one."""
