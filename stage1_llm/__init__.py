"""Stage 1: text -> semantic tokens, and the hidden states behind them."""
