"""Claims of stage 2, proved on a user's own run: what `tts-stack check stream|states` does."""
