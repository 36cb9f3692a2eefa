"""Sizes that only have to run, not to learn, for the end-to-end tests."""

SMALL_CODEC = ["codec=fsq_25hz_small", "codec.hidden_size=32", "codec.ffn_size=32"]
SMALL_LLM = ["llm=tiny", "batching.max_tokens=1024"]
SMALL_VOCODER = [
    "vocoder=tiny",
    "discriminator=small",
    "data.num_validation=2",
    "reconstruction.batch_seconds=8",
    "adversarial.batch_size=2",
]
