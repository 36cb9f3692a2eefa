"""Raw text -> what the LLM reads: cleaning, number words, phonemes, sentence splitting."""
